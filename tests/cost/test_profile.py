"""What is learnt of a model's operators: kept over a file, apart for each structure, smoothed over time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flex_trainer.activations.storage_layout import StorageLayout
from flex_trainer.activations.trace import CallTrace, Trace, ValueTrace, Work
from flex_trainer.cost.load import Load
from flex_trainer.cost.profile import Profile
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.shape import BatchShape
from flex_trainer.strategy import Site
from flex_trainer.testing.cost_rules import evaluate

LAYER = Site("layers.0", "layer", 0, is_block=True, is_recomputable=False)
NORM = Site("layers.0.norm", "norm", 0)
CORE = Site("layers.0.attn.core", "attention_core", 0)
EXPERTS = Site("layers.0.experts", "experts", 0, is_block=True)
UP = Site("layers.0.experts.up", "expert_up", 0)


def trace(b: int, s: int, seconds: float = 0.25, num_chunks: int = 1) -> Trace:
    """A layer with a norm, attention over all pairs, and an experts block with two rows a token."""
    calls = [
        CallTrace(LAYER, -1, [0], seconds, 4 * b * s * 8),
        CallTrace(NORM, 0, [0], seconds / 100, 4 * b * s * 8),
        CallTrace(CORE, 0, [1], seconds / 10, 4 * b * s * 8),
        CallTrace(EXPERTS, 0, [2], seconds / 5, 4 * b * s * 8),
        CallTrace(UP, 3, [3], seconds / 7, 4 * 2 * b * s * 16),
    ]
    values = [
        ValueTrace(-1, 4 * b * s * 8, 4, [1]),
        ValueTrace(1, 4 * b * s * 8, 4, [2]),
        ValueTrace(2, 4 * b * s * s, 4, [2]),
        ValueTrace(3, 4 * 2 * b * s * 8, 4, [4]),
        *(ValueTrace(4, 4 * 2 * b * s * 16, 4, [4]) for _ in range(num_chunks)),
    ]
    return Trace(calls, values)


def shape(b: int, s: int, kind: str = "text") -> BatchShape:
    return BatchShape(b, s, kind)


def observed(*shapes: tuple[int, int]) -> Profile:
    profile = Profile()
    for b, s in shapes:
        profile.observe(shape(b, s), trace(b, s), {EXPERTS.name: 2 * b * s})
    return profile


def held(profile: Profile, b: int, s: int) -> int:
    graph = profile.graph(shape(b, s))
    return sum(evaluate(segment, {}, Rates()).held_bytes for segment in graph.segments)


def saved(b: int, s: int) -> int:
    return sum(value.num_bytes for value in trace(b, s).values if value.savers)


def test_knows_a_shape_once_its_sizes_are_certain() -> None:
    profile = observed((2, 20))
    assert profile.knows(shape(2, 20))
    assert not profile.knows(shape(2, 50))
    assert not profile.knows(shape(2, 20, kind="with padding"))
    profile.observe(shape(2, 31), trace(2, 31), {})
    assert profile.knows(shape(2, 50))
    assert held(profile, 2, 50) == saved(2, 50)


def with_rows(b: int, s: int, *, is_symbolic: bool, has_mask: bool) -> Trace:
    """Values in rows of 8 numbers; one of them may hold infinities."""
    made = trace(b, s)
    made.is_symbolic = is_symbolic
    for call in made.calls:
        call.work = Work() if is_symbolic else None
    for value in made.values:
        value.layout = StorageLayout((value.num_bytes // 32, 8), (8, 1), torch.float32)
    made.values[2].has_infinity = has_mask
    return made


def num_quantised(profile: Profile) -> int:
    values = [value for segment in profile.graph(shape(2, 20)).segments for value in segment.values]
    assert len(values) == 5
    return sum(value.num_rows > 0 for value in values)


def test_what_a_trace_saw_infinities_in_is_not_quantised_also_after_a_file(tmp_path: Path) -> None:
    profile = Profile()
    profile.observe(shape(2, 20), with_rows(2, 20, is_symbolic=True, has_mask=True), {})
    profile.observe(shape(3, 31), with_rows(3, 31, is_symbolic=False, has_mask=False), {})
    profile.save(tmp_path / "profile.json", "model")
    assert num_quantised(profile) == num_quantised(Profile.load(tmp_path / "profile.json", "model")) == 4


def test_infinities_of_a_real_run_count_only_where_nothing_was_traced_and_for_this_run(tmp_path: Path) -> None:
    profile = Profile()
    profile.observe(shape(2, 20), with_rows(2, 20, is_symbolic=True, has_mask=False), {})
    profile.observe(shape(2, 20), with_rows(2, 20, is_symbolic=False, has_mask=True), {})
    assert num_quantised(profile) == 5
    untraced = Profile()
    untraced.observe(shape(2, 20), with_rows(2, 20, is_symbolic=False, has_mask=False), {})
    version = untraced.version
    for _ in range(2):
        untraced.observe(shape(2, 20), with_rows(2, 20, is_symbolic=False, has_mask=True), {})
        assert untraced.version == version + 1
    untraced.save(tmp_path / "profile.json", "model")
    assert num_quantised(untraced) == 4
    assert num_quantised(Profile.load(tmp_path / "profile.json", "model")) == 5


def test_a_batch_of_one_row_is_another_kind() -> None:
    profile = observed((2, 20), (3, 31))
    assert profile.knows(shape(5, 20))
    assert not profile.knows(shape(1, 20))


def test_version_grows_only_when_a_plan_may_have_become_wrong() -> None:
    profile = observed((2, 20), (3, 31))
    before = profile.version
    profile.observe(shape(2, 20), trace(2, 20, seconds=9.0), {})  # only times changed
    profile.observe(shape(4, 47), trace(4, 47), {})  # just as predicted
    assert profile.version == before
    profile.observe(shape(4, 48), trace(4, 49), {})  # not as predicted
    assert profile.version > before


def test_structure_that_depends_on_the_length() -> None:
    # Up to 32 tokens one chunk, then two.
    profile = Profile()
    for s in (20, 30, 31, 32):
        profile.observe(shape(2, s), trace(2, s), {})
    for s in (40, 47, 64):
        profile.observe(shape(2, s), trace(2, s, num_chunks=2), {})

    def num_values(s: int) -> int:
        return sum(len(segment.values) for segment in profile.graph(shape(2, s)).segments)

    assert num_values(20) == num_values(25) == num_values(32) == 5
    assert num_values(40) == num_values(63) == num_values(33) == 6
    assert not profile.knows(shape(2, 65))  # perhaps three
    assert profile.knows(shape(2, 10))


def test_a_structure_that_changes_at_one_shape_is_learnt_anew() -> None:
    profile = observed((2, 20), (2, 31))
    before = profile.version
    for num_chunks in (2, 3, 4):
        profile.observe(shape(2, 20), trace(2, 20, num_chunks=num_chunks), {})
    assert profile.version > before
    assert sum(len(segment.values) for segment in profile.graph(shape(2, 20)).segments) == 8
    assert sum(len(segment.values) for segment in profile.graph(shape(2, 31)).segments) == 5
    assert sum(len(known) for known in profile._structures.values()) == 2  # what no shape has any more is forgotten


def test_times_are_smoothed_and_scale_with_the_work() -> None:
    profile = observed((2, 20), (3, 31))

    def seconds(b: int, s: int) -> dict[str, float]:
        operators = profile.graph(shape(b, s)).segments[0].operators
        return {op.site.name: op.seconds for op in operators}

    before = seconds(2, 20)
    assert seconds(4, 20)[NORM.name] == pytest.approx(2 * before[NORM.name])
    assert seconds(2, 60)[NORM.name] == pytest.approx(3 * before[NORM.name])
    assert seconds(2, 60)[CORE.name] == pytest.approx(9 * before[CORE.name])  # all pairs
    slow = trace(2, 20, seconds=25.0)
    profile.observe(shape(2, 20), slow, {})
    after = seconds(2, 20)[NORM.name]
    assert before[NORM.name] < after < 0.25
    assert after == pytest.approx(0.7 * before[NORM.name] + 0.3 * 0.25)
    for _ in range(30):
        profile.observe(shape(2, 20), slow, {})
    assert seconds(2, 20)[NORM.name] == pytest.approx(0.25, rel=1e-3)


def test_rows_are_the_most_seen_for_each_token() -> None:
    profile = observed((2, 20), (3, 31))
    assert profile.planned_pairs(shape(2, 50)).get(EXPERTS.name) == 200
    profile.observe(shape(2, 20), trace(2, 20), {EXPERTS.name: 3 * 40})
    assert profile.planned_pairs(shape(2, 50)).get(EXPERTS.name) == 300
    profile.observe(shape(2, 20), trace(2, 20), {EXPERTS.name: 40})
    assert profile.planned_pairs(shape(2, 50)).get(EXPERTS.name) == 300
    assert profile.planned_pairs(shape(2, 50)).get("another") is None
    assert profile.planned_pairs(shape(2, 50, kind="another")).get(EXPERTS.name) is None


def test_more_routed_rows_make_the_experts_values_larger_and_nothing_else() -> None:
    graph = observed((2, 20)).graph(shape(2, 20))
    layer, scaled = graph.segments[0], graph.with_loads({0: Load(1.5, 1.5)}).segments[0]
    for operator, before, after in ((v.owner, v, w) for v, w in zip(layer.values, scaled.values, strict=True)):
        factor = 1.5 if operator >= 0 and layer.operators[operator].site.kind.startswith("expert") else 1
        assert after.num_bytes == before.num_bytes * factor
    up, scaled_up = layer.operators[4], scaled.operators[4]
    assert scaled_up.seconds == pytest.approx(1.5 * up.seconds)
    assert scaled_up.output_bytes == 1.5 * up.output_bytes
    assert scaled.operators[1] == layer.operators[1]
    assert graph.with_loads({1: Load(2.0, 2.0)}) == graph


# The file


def test_file_keeps_everything(tmp_path: Path) -> None:
    profile = observed((2, 20), (3, 31), (1, 20))
    path = tmp_path / "new" / "profile.json"
    profile.save(path, "model-a")
    loaded = Profile.load(path, "model-a")
    for b, s in ((2, 20), (7, 90), (1, 20)):
        assert loaded.knows(shape(b, s)) == profile.knows(shape(b, s))
        assert loaded.graph(shape(b, s)) == profile.graph(shape(b, s))
        assert loaded.planned_pairs(shape(b, s)).get(EXPERTS.name) == profile.planned_pairs(shape(b, s)).get(
            EXPERTS.name
        )
    loaded.observe(shape(2, 20), trace(2, 20), {})
    assert sum(len(known) for known in loaded._structures.values()) == 2  # recognized, not learnt again
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    observed((2, 20)).save(path, "model-a")
    with pytest.raises(ValueError, match=r"belongs to another model or version \('model-a', this run is 'model-b'\)"):
        Profile.load(path, "model-b")


def broken(**changes: Any) -> str:
    file = {"format": 4, "fingerprint": "model-a", "structures": []}
    return json.dumps({key: value for key, value in (file | changes).items() if value is not None})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        "null",
        '"text"',
        broken(format=None),
        broken(fingerprint=None),
        broken(structures=None),
        broken(structures=7),
        broken(structures=[{"key": "text"}]),
        "\x00\xff",
    ],
)
def test_file_that_is_no_profile_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"^seed_profile='.*profile.json' is not a FlexTrainer profile .*delete it"):
        Profile.load(path, "model-a")


def test_file_cut_by_hand_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    observed((2, 20)).save(path, "model-a")
    data = json.loads(path.read_text())
    data["structures"][0]["values"].pop()
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"lists that belong together differ in length"):
        Profile.load(path, "model-a")


def test_a_directory_in_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a FlexTrainer profile"):
        Profile.load(tmp_path, "model-a")
    with pytest.raises(ValueError, match=r"seed profile cannot be written"):
        observed((2, 20)).save(tmp_path, "model-a")


def test_only_what_is_not_as_expected_is_observed() -> None:
    profile = Profile()
    for s in (20, 31, 48):
        profile.observe(shape(2, s), trace(2, s), {})
    known = trace(2, 20)
    saved_bytes = sum(value.num_bytes for value in known.values if value.savers)

    def is_as_expected(demand_bytes: int) -> bool:
        return profile.is_as_expected(shape(2, 20), known.counts, demand_bytes, {}, {EXPERTS.name: 80})

    answers = [is_as_expected(saved_bytes) for _ in range(32)]
    assert answers.count(False) == 5 and not any(answers[:3])  # the first three, then every 16th
    assert not is_as_expected(saved_bytes + 1)
    assert not profile.is_as_expected(shape(2, 20), trace(2, 20, num_chunks=2).counts, saved_bytes, {}, {})
    num_calls, num_values, num_recomputable = known.counts
    assert not profile.is_as_expected(
        shape(2, 20), (num_calls, num_values, num_recomputable - 1), saved_bytes, {}, {}
    ), "an operator may not be recomputed any more"
    assert profile.planned_pairs(shape(2, 20)).get(EXPERTS.name) == 80  # noted without being observed


def test_samples_and_shapes_are_bounded() -> None:
    profile = Profile()
    for s in range(1, 300):
        profile.observe(shape(2, s), trace(2, s, seconds=1.0), {})
        profile.observe(shape(2, s), trace(2, s + 1), {})  # never as predicted
    [[structure]] = profile._structures.values()
    assert len(structure._samples) <= 64
    assert len(structure._value_scaling._shapes) <= 256
