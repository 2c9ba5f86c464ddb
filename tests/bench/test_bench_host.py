"""What `bench host` reports, on stubbed sizes: its figures are of no interest here."""

from __future__ import annotations

from typing import Any

import pytest

from flex_trainer.bench import host, host_planning


def figures(**changed: float) -> dict[str, Any]:
    """Figures that just meet every bound, but for those that are changed."""
    values = {**host.BOUNDS, **changed}
    side = {name: values[name] for name in ("forward_ratio", "backward_ratio", "us_per_operator", "region_us")}
    return {
        **{f"{architecture}, gc on": dict(side) for architecture in host.ARCHITECTURES},
        "planning": {name: values[name] for name in ("hit_ms", "new_length_ms", "cold_ms", "replan_ms")},
        "growth": {name: values[f"growth_{name}"] for name in ("bytes_per_micro_batch", "records")},
    }


def test_each_bound_decides_its_requirement() -> None:
    assert host.meets(figures()) == {"1": True, "2": True, "3": True, "4": True}
    missed = {"forward_ratio": "1", "us_per_operator": "1", "region_us": "2", "growth_records": "3", "replan_ms": "4"}
    for name, number in missed.items():
        met = host.meets(figures(**{name: host.BOUNDS[name] * 1.01 + 0.01}))
        assert [key for key, is_met in met.items() if not is_met] == [number], name


@pytest.mark.sweep
def test_all_sides_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ARCHITECTURES", ("qwen3_moe",))
    monkeypatch.setattr(host, "_QUICK_DEPTH", 2)
    monkeypatch.setattr(host, "planning", lambda num_layers: figures()["planning"])
    monkeypatch.setattr(host, "growth", lambda num_micro_batches: figures()["growth"])
    found, bounds, met = host.measure(is_quick=True)
    assert bounds is host.BOUNDS and met.keys() == {"1", "2", "3", "4"}
    for key in ("qwen3_moe, gc on", "qwen3_moe, gc off"):
        side = found[key]
        assert 2 * 8 < side["num_regions"] < side["num_operators"]
        assert all(side[name] > 0 for name in ("forward_ratio", "backward_ratio", "mean_forward_ratio", "forward_ms"))
        assert side["recomputed_forward_ms"] > side["plain_forward_ms"]


@pytest.mark.sweep
def test_planning_is_timed_with_its_replans() -> None:
    found = host_planning.planning(num_layers=6)
    assert found["replans"] > 0 and found["replan_ms"] > 0
    assert found["hit_ms"] > 0 and found["trace_ms"] > 0
