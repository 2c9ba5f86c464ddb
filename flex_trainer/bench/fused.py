"""`flex-trainer bench fused`: forward and backward of neighbouring micro-batches together, against one after the other.

    equality   requirement 1   losses, gradients and weights bit for bit, 6 families, several windows and strategies
    link       requirement 2   step time on a slow link, orders compared; also 7, predicted times of pairs
    loopback   requirement 3   fuse=auto where there is little to hide
    memory     requirement 4   spikes under a limit, fused throughout
    planning   requirement 5   times of planning an order

Two ranks on the CPU over gloo, one thread each; for `link`, each in a network namespace of its own. The cores carry
both ranks, so shapes are chosen where the network is what is waited for. (Requirement 6, faults, is a test:
tests/distributed/test_launch_ranks.py.)
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rich.console import Console

from flex_trainer.bench.ep import quick, slowest
from flex_trainer.bench.ep_model import SPEED, write_model
from flex_trainer.bench.ep_ranks import run_ranks, values_of
from flex_trainer.bench.fused_equality import measure_equality
from flex_trainer.bench.fused_memory import measure_memory
from flex_trainer.bench.fused_planning import measure_planning
from flex_trainer.bench.network import two_hosts, why_no_hosts
from flex_trainer.bench.shapes import BenchShape
from flex_trainer.config import nearest
from flex_trainer.errors import UserError

BOUNDS = {
    "link_step_ratio": 0.67,
    "link_mitigated_step_ratio": 0.72,
    "loopback_auto_ratio": 1.03,
    "planning_found_ms": 0.1,
    "planning_cold_ms": 50.0,
    "choice_percent": 0.1,
    "pair_time_error_percent": 10.0,
}
PARTS = ("equality", "link", "loopback", "memory", "planning")
LINKS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "keep": ("350mbit", {"strategies": ()}),
    "mitigated": ("150mbit", {"choices": "mixed"}),
}
"""What is measured on a link, its rate, and how a `Way` does it. At these rates exchanges and gathers take about as
long as computing does. With strategies, freed memory goes back to the system, so that computing more than doubles on a
CPU: new memory has to be zeroed each time (docs/benchmarks.md)."""
ACCUMULATION = 16
MEGATRON = "BFFBF"
"""Of a layer pair: combine-backward beside attention-forward, expert-backward beside dispatch-forward, ..."""
SHAPE = replace(SPEED, name="fused", config={**SPEED.config, "num_hidden_layers": 4})
_AMPLE = "6GiB"
_NUM_ROUNDS = 3


def measure(is_quick: bool) -> tuple[dict[str, Any], dict[str, float], dict[str, bool]]:
    """Figures, bounds and met requirements, of all parts."""
    return measure_parts(is_quick)


def measure_parts(
    is_quick: bool, parts: Collection[str] = PARTS
) -> tuple[dict[str, Any], dict[str, float], dict[str, bool]]:
    """The same of some parts.

    Raises:
        ValueError: an unknown part.
    """
    for part in parts:
        if part not in PARTS:
            raise UserError(f"bench fused has no part {part!r}; {nearest(part, PARTS)}")
    console = Console(stderr=True)
    shape = quick(SHAPE) if is_quick else SHAPE
    num_rounds = 2 if is_quick else _NUM_ROUNDS
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "equality": lambda: measure_equality(console, is_quick=is_quick),
        "link": lambda: measure_link(shape, num_rounds, console),
        "loopback": lambda: measure_loopback(shape, num_rounds, console),
        "memory": lambda: measure_memory(console, is_quick=is_quick),
        "planning": lambda: measure_planning(console),
    }
    figures: dict[str, Any] = {}
    for part in PARTS:
        if part in parts:
            figures |= {f"{part}/{key}": value for key, value in measures[part]().items()}
    return figures, dict(BOUNDS), _meets(figures)


def _meets(figures: Mapping[str, Any]) -> dict[str, bool]:
    """By requirement, of those parts that were measured."""
    meets: dict[str, bool] = {}
    if "equality/num_cases" in figures:
        meets["1"] = figures["equality/num_different"] == 0
    if "link/keep/step_ratio" in figures:
        meets["2"] = (
            figures["link/keep/step_ratio"] <= BOUNDS["link_step_ratio"]
            and figures["link/mitigated/step_ratio"] <= BOUNDS["link_mitigated_step_ratio"]
            and figures["link/keep/planned_over_megatron"] <= 1.0
            and figures["link/mitigated/planned_over_megatron"] < 1.0
        )
        meets["7"] = all(
            figures[f"link/{kind}/pair_time_error_percent"] <= BOUNDS["pair_time_error_percent"] for kind in LINKS
        )
    if "loopback/auto_ratio" in figures:
        meets["3"] = figures["loopback/auto_ratio"] <= BOUNDS["loopback_auto_ratio"]
    if "memory/num_over_limit" in figures:
        meets["4"] = (
            figures["memory/num_over_limit"] == 0
            and min(figures["memory/num_pairs"]) > 0
            and figures["memory/finishes_under_a_cap"]
            and figures["memory/has_equal_losses"]
        )
    if "planning/cold_ms" in figures:
        meets["5"] = (
            figures["planning/found_ms"] <= BOUNDS["planning_found_ms"]
            and figures["planning/cold_ms"] <= BOUNDS["planning_cold_ms"]
        )
    if "link/keep/choice_percent" in figures:
        meets["5, over a run"] = figures["link/keep/choice_percent"] <= BOUNDS["choice_percent"]
    return meets


def measure_link(shape: BenchShape, num_rounds: int, console: Console) -> dict[str, Any]:
    """Figures of requirements 2 and 7. Without two hosts, no figure but the reason."""
    reason = why_no_hosts()
    if reason is not None:
        console.print(f"link: skipped; {reason}", highlight=False)
        return {"skipped": reason}
    figures: dict[str, Any] = {}
    for kind, (rate, how) in LINKS.items():
        ways = {
            "sequential": {"fuse": False, **how},
            "fused": {"fuse": True, **how},
            "megatron": {"fuse": True, "pattern": MEGATRON, **how},
        }
        console.print(f"link: {kind}, over {rate}, {num_rounds} steps of each way in turns", highlight=False)
        found = _in_turns(shape, ways, num_rounds, rate)
        figures |= {f"{kind}/{key}": value for key, value in link_figures(found).items()}
    return figures


def measure_loopback(shape: BenchShape, num_rounds: int, console: Console) -> dict[str, Any]:
    """Figures of requirement 3."""
    ways = {"sequential": {"fuse": False}, "auto": {"fuse": "auto"}, "fused": {"fuse": True}}
    console.print(f"loopback: {num_rounds} steps of each way in turns", highlight=False)
    found = _in_turns(shape, ways, num_rounds, None)
    steps = {name: slowest(found, name, "seconds") for name in ways}
    return {
        "step_s": steps,
        "auto_ratio": steps["auto"] / steps["sequential"],
        "fused_ratio": steps["fused"] / steps["sequential"],
        "auto_fuses": found[0]["auto"]["num_pairs"] > 0,
        "has_equal_losses": _has_equal_losses(found),
        "all_step_s": _all_steps(found),
    }


def link_figures(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """From what each rank has measured of each way."""
    steps = {name: slowest(ranks, name, "seconds") for name in ranks[0]}
    fused = ranks[0]["fused"]
    pairs = [(p, q) for p, q in zip(fused["pair_ms"], fused["predicted_pair_ms"], strict=True) if p and q]
    hidden = {
        name: 1 - sum(ranks[0][name]["exposed_ms"]) / max(sum(ranks[0][name]["exchange_ms"]), 1e-9)
        for name in ("fused", "megatron")
    }
    return {
        "step_s": steps,
        "cpu_s": {name: statistics.median(ranks[0][name]["cpu_seconds"]) for name in ranks[0]},
        "step_ratio": steps["fused"] / steps["sequential"],
        "planned_over_megatron": steps["fused"] / steps["megatron"],
        "compute_ms": fused.get("compute_ms"),
        "exchange_ms": fused.get("exchange_alone_ms"),
        "hidden_share": hidden,
        "choice_percent": 100 * fused["choice_seconds"] / fused["run_seconds"],
        "pair_ms": statistics.median(pair for pair, _ in pairs) if pairs else None,
        "pair_time_error_percent": statistics.mean(100 * abs(p - q) / p for p, q in pairs) if pairs else None,
        "freed_mib": {name: ranks[0][name]["freed_bytes"] / 2**20 for name in ranks[0]},
        "has_equal_losses": _has_equal_losses(ranks),
        "all_step_s": _all_steps(ranks),
    }


def _in_turns(
    shape: BenchShape, ways: Mapping[str, Mapping[str, Any]], num_rounds: int, rate: str | None
) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="flex-bench-"))
        hosts = stack.enter_context(two_hosts(rate)) if rate is not None else None
        arguments = {
            "path": str(write_model(shape, directory)),
            "batch_size": shape.batch_size,
            "sequence_length": shape.sequence_length,
            "accumulation": ACCUMULATION,
            "memory_limit": _AMPLE,
            "ways": ways,
            "num_rounds": num_rounds,
        }
        results = run_ranks("flex_trainer.bench.fused_ranks:in_turns", arguments, 2, hosts=hosts)
    return values_of(results, "fused and one after the other")


def _all_steps(ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """Seconds by way, rank and step."""
    return {name: [rank[name]["seconds"] for rank in ranks] for name in ranks[0]}


def _has_equal_losses(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Every way has the losses of the first one, on every rank."""
    return all(way["losses"] == next(iter(rank.values()))["losses"] for rank in ranks for way in rank.values())
