"""The offload file: places never overlap while in use, and are used again."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.activations.file_tier import FileTier
from tests.tiers import examples


def flat(num_bytes: int, value: int) -> torch.Tensor:
    return torch.full((num_bytes,), value % 256, dtype=torch.uint8)


@examples(50)
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(0, 40_000)),
            st.tuples(st.just("free"), st.integers(0, 20)),
        ),
        max_size=30,
    )
)
def test_places_do_not_overlap_and_contents_stay(actions: list[tuple[str, int]]):
    tier = FileTier()
    alive: list[tuple[tuple[int, int], torch.Tensor]] = []
    for number, (action, argument) in enumerate(actions):
        if action == "write":
            source = flat(argument, number)
            place, copy = tier.write(source)
            copy.wait()
            alive.append((place, source))
        elif alive:
            tier.free(alive.pop(argument % len(alive))[0])
        spans = sorted(place for place, _ in alive)
        assert all(first[0] + first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))
        assert all(place[1] >= source.numel() for place, source in alive)
    for place, source in alive:
        target = torch.empty_like(source)
        tier.read(place, target).wait()
        assert torch.equal(target, source)


def test_free_places_are_joined_and_used_again():
    tier = FileTier()
    places = []
    for number in range(8):
        place, copy = tier.write(flat(4096, number))
        copy.wait()
        places.append(place)
    for place in (places[3], places[1], places[2]):
        tier.free(place)
    joined, copy = tier.write(flat(3 * 4096, 9))
    copy.wait()
    assert joined == (4096, 3 * 4096)
    assert "32" in tier.describe()  # still 32 KiB in all


def test_a_file_without_a_name(tmp_path: Path):
    tier = FileTier(tmp_path)
    _, copy = tier.write(flat(100, 1))
    copy.wait()
    assert list(tmp_path.iterdir()) == []


def test_directories_that_cannot_be_used(tmp_path: Path):
    with pytest.raises(ValueError, match=r"offload_to='.*nowhere' cannot be used \(No such file or directory\)"):
        FileTier(tmp_path / "nowhere")
    a_file = tmp_path / "file"
    a_file.write_text("")
    a_file.chmod(stat.S_IRUSR)
    with pytest.raises(ValueError, match="cannot be used"):
        FileTier(a_file)


def test_a_file_cut_short_is_an_error_not_garbage():
    tier = FileTier()
    place, copy = tier.write(flat(10_000, 1))
    copy.wait()
    tier._file.truncate(5000)
    with pytest.raises(OSError, match="shorter than what was written"):
        tier.read(place, torch.empty(10_000, dtype=torch.uint8)).wait()
