"""The benchmarks step and survive: their arithmetic, on made-up runs; and that their parts really train."""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Any

import pytest

from flex_trainer import bench
from flex_trainer.bench import step, survive
from flex_trainer.bench.child import varied_lengths
from flex_trainer.bench.peers import PEERS
from flex_trainer.bench.shapes import REFERENCE, UNEQUAL_HEADS
from flex_trainer.testing.processes import SubprocessResult, run_in_subprocess

MIB = 2**20


def record(**changes: Any) -> dict[str, Any]:
    return {
        "freed_bytes": {"recompute": 3 * MIB, "offload": 0, "quantize": 0},
        "plan_ms": 1.0,
        "step_ms": 1000.0,
        "predicted_bytes": 100,
        "actual_bytes": 100,
        "peak_bytes": 95 * MIB,
        "limit_bytes": 100 * MIB,
        "is_spike": True,
        "is_profile": False,
        **changes,
    }


class FakeRuns:
    """Stands for the child processes: what each side takes and needs."""

    def __init__(self, *, flex_dies: bool = False, flex_losses: tuple[float, ...] | None = None) -> None:
        self.flex_dies = flex_dies
        self.flex_losses = flex_losses
        self.seconds = {"plain": 1.0, "checkpoint": 1.4, "flex": 1.1, "every_second_layer": 1.2, "selective": 1.3}
        self.peaks = dict.fromkeys(self.seconds, 150 * MIB) | {"plain": 200 * MIB, "checkpoint": 100 * MIB}
        self.peer_losses: list[float] | None = None

    def __call__(self, shape: Any, lengths: list[int], *, side: str, **options: Any) -> SubprocessResult:
        capped = options.get("enforce_bytes") is not None
        if capped and (side == "plain" or self.flex_dies):
            error = "RuntimeError: DefaultCPUAllocator: can't allocate memory"
            return SubprocessResult(None, 1, 0, error, "", "")
        if side == "trl_offload":
            return SubprocessResult({"unavailable": "it needs an accelerator"}, 0, 0, "", "", "")
        losses = [1.0 / (number + 1) for number in range(len(lengths))]
        if side == "flex" and self.flex_losses is not None:
            losses = list(self.flex_losses)[: len(lengths)]
        if side == "selective" and self.peer_losses is not None:
            losses = self.peer_losses
        seconds = self.seconds[side] if side != "flex" or capped else 1.0
        value = {
            "losses": losses,
            "seconds": [9.0, 9.0, *[seconds] * (len(lengths) - 2)],
            "core_seconds": [9.0, 9.0, *[2 * seconds] * (len(lengths) - 2)],
            "peak_bytes": self.peaks[side],
            "records": [record(is_profile=number == 0) for number in range(len(lengths))],
        }
        return SubprocessResult(value, 0, self.peaks[side], "", "", "")


def figures(monkeypatch: pytest.MonkeyPatch, runs: FakeRuns) -> tuple[dict[str, Any], dict[str, bool]]:
    monkeypatch.setattr(step, "_try", runs)
    found, _, meets = step.measure(is_quick=True)
    return found, meets


def test_figures_and_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    found, meets = figures(monkeypatch, FakeRuns())
    assert found["reference/cap_mib"] == 160.0  # 100 + 0.6 x (200 - 100)
    assert found["reference/cap_vs_plain_step_ratio"] == pytest.approx(1.1)
    assert found["reference/cap_vs_checkpoint_step_ratio"] == pytest.approx(1.1 / 1.4)
    assert found["reference/ample_vs_plain_core_ratio"] == 1.0
    assert found["reference/freed_recompute_mib"] == 3.0
    assert found["reference/plan_share"] == pytest.approx(0.001)
    assert found["varied/use_of_limit_under_demand"] == pytest.approx(0.95)
    assert found["reference/peer_selective_step_s"] == 1.3
    assert found["reference/peer_every_second_layer_peak_mib"] == 150.0
    assert found["reference/peer_trl_offload"] == "it needs an accelerator"
    assert meets == {"1": True, "2": True, "3": True, "4": True, "5": True, "peers": True}


def test_a_missed_bound_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = FakeRuns()
    runs.seconds["flex"] = 1.3
    assert figures(monkeypatch, runs)[1]["2"] is False


def test_a_peer_that_trains_something_else_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = FakeRuns()
    runs.peer_losses = [9.0]
    found, meets = figures(monkeypatch, runs)
    assert found["reference/peer_selective_losses_are_equal"] is False and meets["peers"] is False


def test_other_losses_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found, meets = figures(monkeypatch, FakeRuns(flex_losses=(1.0, 0.5, 1 / 3, 0.25, 0.2000001)))
    assert found["reference/losses_are_bit_equal"] is False
    assert meets["1"] is False and meets["3"] is False


def test_dying_at_the_cap_is_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    found, meets = figures(monkeypatch, FakeRuns(flex_dies=True))
    assert found["reference/flex_finishes_at_cap"] is False
    assert meets == {"1": False, "2": False, "3": True, "4": False, "5": False, "peers": True}
    json.dumps(found)


def test_lengths_vary_eightfold_and_repeat() -> None:
    lengths = varied_lengths(300, 128, 1024, seed=0)
    assert lengths == varied_lengths(300, 128, 1024, seed=0)
    assert len(lengths) == 300 and max(lengths) == 1024 and min(lengths) <= 136
    assert all(length % 8 == 0 for length in lengths)
    assert len(set(lengths)) > 50


def test_an_unknown_benchmark_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no benchmark 'stap'; did you mean 'step'"):
        bench.run("stap")


@pytest.mark.sweep
def test_every_peer_trains_or_says_why_not() -> None:
    """In one process: each gives the plain run's losses, bit for bit."""
    # fewer heads than in the benchmark, and queries wider than values, as there
    config = {**UNEQUAL_HEADS.config, "num_hidden_layers": 2, "hidden_size": 32, "moe_intermediate_size": 16}
    arguments = {"architecture": "deepseek_v3", "config": config, "batch_size": 1, "lengths": [16, 24]}
    result = run_in_subprocess("tests.bench.peer_jobs:train_all", {"sides": list(PEERS), **arguments})
    assert result.exit_code == 0, result.stderr
    plain = result.value["plain"]["losses"]
    assert all(4.0 < loss < 8.0 for loss in plain)
    for name in PEERS:
        if name == "trl_offload" and "unavailable" in result.value[name]:
            assert "accelerator" in result.value[name]["unavailable"] or "imported" in result.value[name]["unavailable"]
        else:
            assert result.value[name]["losses"] == plain, name


@pytest.mark.sweep
@pytest.mark.parametrize("side", ["plain", "flex"])
def test_a_side_trains_in_its_own_process(side: str) -> None:
    config = {**REFERENCE.config, "num_hidden_layers": 2, "hidden_size": 32, "moe_intermediate_size": 16}
    arguments = {"architecture": "deepseek_v3", "config": config, "batch_size": 1, "lengths": [16, 24], "side": side}
    result = run_in_subprocess("flex_trainer.bench.child:train", arguments)
    assert result.exit_code == 0, result.stderr
    assert len(result.value["losses"]) == len(result.value["seconds"]) == 2
    assert all(4.0 < loss < 8.0 for loss in result.value["losses"])
    assert len(result.value.get("records", ())) == (2 if side == "flex" else 0)


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_every_benchmark_is_found_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"flex_trainer.bench.{name}")
    assert list(inspect.signature(module.measure).parameters) == ["is_quick"]
    monkeypatch.setattr(module, "measure", lambda is_quick: ({"is_quick": is_quick}, {}, {}))
    result = bench.run(name, quick=True)
    assert (result["name"], result["figures"]) == (name, {"is_quick": True})


@pytest.mark.sweep
@pytest.mark.timeout(600)  # three processes, each of which traces and trains
def test_survive_runs() -> None:
    """The quick benchmark, with fewer micro-batches still."""

    def value(function: str, **arguments: Any) -> Any:
        result = run_in_subprocess(f"flex_trainer.bench.survive_child:{function}", arguments, timeout_s=190.0)
        assert result.exit_code == 0, result.stderr
        return result.value

    plain, flex = (
        value("random_micro_batches", num_runs=1, num_per_run=2, is_flex=is_flex) for is_flex in (False, True)
    )
    assert plain["losses"] == flex["losses"] and len(flex["losses"]) == 3
    assert (flex["num_over"], flex["live_bytes"]) == (0, 0)
    assert value("injected_failures", where="backward", num_points=1) == {"num_points": 1, "num_unequal": 0}


def test_survive_counts_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    side = {"losses": [1.0, 2.0], "num_over": 0, "live_bytes": 0, "num_spikes": 1, "num_retries": 0}
    changes: dict[str, Any] = {}

    def run(function: str, arguments: dict[str, Any], timeout_s: float) -> SubprocessResult:
        if "where" in arguments:
            value: Any = {"num_points": 1, "num_unequal": changes.get("num_unequal", 0)}
        else:
            value = {**side, **(changes if arguments["is_flex"] else {})}
        has_died = changes.get("dies") == arguments.get("where", arguments.get("is_flex"))
        return SubprocessResult(None if has_died else value, int(has_died), 0, "", "", "")

    monkeypatch.setattr(survive, "run_in_subprocess", run)
    assert survive.measure(is_quick=True)[2] == {"4": True, "5": True}
    for changes, meets in (
        ({"losses": [1.0, 2.5]}, {"4": False, "5": True}),
        ({"num_over": 1}, {"4": False, "5": True}),
        ({"live_bytes": 8}, {"4": False, "5": True}),
        ({"dies": True}, {"4": False, "5": True}),
        ({"num_unequal": 1}, {"4": True, "5": False}),
        ({"dies": "recovery"}, {"4": True, "5": False}),
    ):
        assert survive.measure(is_quick=True)[2] == meets, changes
