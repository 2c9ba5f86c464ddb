"""`flex-trainer bench fused`: what it makes of what the ranks measured, and that its parts run."""

from __future__ import annotations

from typing import Any

import pytest

from flex_trainer.bench import fused
from flex_trainer.errors import UserError


def way(seconds: float, exposed: float = 0.0, exchange: float = 0.0, pair: float = 0.0, **more: Any) -> dict[str, Any]:
    """What a rank says of one way: two steps of two micro-batches."""
    return {
        "seconds": [seconds, seconds],
        "cpu_seconds": [seconds, seconds],
        "losses": [1.0] * 4,
        "exposed_ms": [exposed] * 4,
        "exchange_ms": [exchange] * 4,
        "pair_ms": [0.0, pair] * 2,
        "predicted_pair_ms": [0.0, 1.05 * pair] * 2,
        "freed_bytes": 0,
        "num_pairs": 2,
        "run_seconds": 4 * seconds,
        "choice_seconds": 0.002 * seconds,
        **more,
    }


def ranks(fused_seconds: float) -> list[dict[str, Any]]:
    one = {
        "sequential": way(10.0),
        "fused": way(fused_seconds, 20.0, 100.0, 50.0, compute_ms=40.0, exchange_alone_ms=30.0),
        "megatron": way(8.0, 40.0, 100.0, 60.0),
    }
    slower = {name: {**values, "seconds": [1.1 * one for one in values["seconds"]]} for name, values in one.items()}
    return [one, slower]


def test_figures_of_a_link() -> None:
    figures = fused.link_figures(ranks(6.0))
    assert figures["step_s"]["fused"] == pytest.approx(6.6)  # of the slower rank
    assert figures["step_ratio"] == pytest.approx(0.6)
    assert figures["planned_over_megatron"] == pytest.approx(0.75)
    assert figures["hidden_share"] == pytest.approx({"fused": 0.8, "megatron": 0.6})
    assert figures["pair_time_error_percent"] == pytest.approx(5.0)
    assert figures["has_equal_losses"]
    assert figures["choice_percent"] == pytest.approx(0.05)


@pytest.mark.parametrize(("seconds", "is_met"), [(6.0, True), (7.0, False)])
def test_what_is_met(seconds: float, is_met: bool) -> None:
    of_link = fused.link_figures(ranks(seconds))
    figures = {f"link/{kind}/{key}": value for kind in ("keep", "mitigated") for key, value in of_link.items()}
    assert fused._meets(figures) == {"2": is_met, "5, over a run": True, "7": True}
    figures = {"equality/num_cases": 4, "equality/num_different": 0 if is_met else 1}
    assert fused._meets(figures) == {"1": is_met}


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(UserError, match="no part 'lnik'; did you mean 'link'"):
        fused.measure_parts(True, ["lnik"])


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_its_parts_run() -> None:
    figures, _, meets = fused.measure_parts(True)
    assert meets["1"] and figures["equality/num_pairs"] > 0
    assert figures["loopback/has_equal_losses"]
    assert figures["memory/has_equal_losses"] and figures["memory/num_over_limit"] == 0
    assert figures["planning/cold_exact_share"] > 0
    if "link/skipped" not in figures:
        assert figures["link/keep/has_equal_losses"] and figures["link/mitigated/has_equal_losses"]
        assert figures["link/mitigated/freed_mib"]["fused"] > 0
