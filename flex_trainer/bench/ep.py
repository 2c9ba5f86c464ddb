"""`flex-trainer bench ep`: experts on several ranks, FlexTrainer's implementation against transformers' own.

    equality   requirement 1   loss and every gradient against one process, 6 families, under every strategy
    skew       requirement 2   all tokens to rank 0 under a real cap: native dies, FlexTrainer finishes
    wire       requirement 3   bytes sent at EP 2 with top-4, and step time over 1 Gbit/s between two hosts
    loopback   requirement 4   step time on one machine, without pressure

Everything runs on the CPU over gloo, one process and one thread for each rank. Times are medians of steps that both
implementations take in turns in the same processes; of the ranks the slower one counts.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from rich.console import Console

from flex_trainer.bench.ep_equality import FAMILIES, MESHES, measure_equality
from flex_trainer.bench.ep_model import FLEX, NATIVE, SKEW, SPEED, write_model
from flex_trainer.bench.ep_ranks import run_ranks, values_of
from flex_trainer.bench.ep_skew import NUM_STEPS, measure_skew
from flex_trainer.bench.network import two_hosts, why_no_hosts
from flex_trainer.bench.shapes import BenchShape
from flex_trainer.config import nearest
from flex_trainer.errors import UserError

BOUNDS = {
    "gradient_error": 1e-5,
    "quantize_gradient_error": 0.05,
    "skew_loss_error": 1e-5,
    "wire_bytes_ratio": 0.55,
    "wire_step_ratio": 0.78,
    "loopback_step_ratio": 1.03,
}
PARTS = ("equality", "skew", "wire", "loopback")
RATE = "1gbit"
_NUM_RANKS = 2
_NUM_ROUNDS = 11


def measure(is_quick: bool) -> tuple[dict[str, Any], dict[str, float], dict[str, bool]]:
    """Figures, bounds and met requirements, of all parts."""
    return measure_parts(is_quick)


def measure_parts(
    is_quick: bool, parts: Collection[str] = PARTS, num_ranks: int | None = None
) -> tuple[dict[str, Any], dict[str, float], dict[str, bool]]:
    """The same of some parts.

    Args:
        parts: any of `PARTS`.
        num_ranks: of equality, the meshes of so many ranks only; the other parts take 2.

    Raises:
        ValueError: an unknown part, or a number of ranks for which there is no mesh.
    """
    for part in parts:
        if part not in PARTS:
            raise UserError(f"bench ep has no part {part!r}; {nearest(part, PARTS)}")
    meshes = [mesh for mesh in MESHES if num_ranks in (None, mesh.num_ranks)]
    if not meshes:
        known = sorted({mesh.num_ranks for mesh in MESHES})
        raise UserError(f"bench ep has no mesh of {num_ranks} ranks; it has some of {known}")
    console = Console(stderr=True)
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "equality": lambda: measure_equality(
            meshes[:1] if is_quick else meshes, FAMILIES[:1] if is_quick else FAMILIES, console
        ),
        "skew": lambda: measure_skew(quick(SKEW) if is_quick else SKEW, 2 if is_quick else NUM_STEPS, console),
        "wire": lambda: measure_wire(quick(SPEED) if is_quick else SPEED, 2 if is_quick else _NUM_ROUNDS, console),
        "loopback": lambda: measure_loopback(
            quick(SPEED) if is_quick else SPEED, 2 if is_quick else _NUM_ROUNDS, console
        ),
    }
    figures: dict[str, Any] = {}
    for part in PARTS:
        if part in parts:
            figures |= {f"{part}/{key}": value for key, value in measures[part]().items()}
    return figures, dict(BOUNDS), _meets(figures)


def _meets(figures: Mapping[str, Any]) -> dict[str, bool]:
    """By requirement, of those parts that were measured."""
    meets: dict[str, bool] = {}
    if "equality/worst_gradient_error" in figures:
        meets["1"] = (
            max(figures["equality/worst_loss_error"], figures["equality/worst_gradient_error"])
            <= BOUNDS["gradient_error"]
            and figures["equality/worst_quantize_gradient_error"] <= BOUNDS["quantize_gradient_error"]
            and figures["equality/strategies_free_memory"]
        )
    if "skew/cap_mib" in figures:
        meets["2"] = (
            figures["skew/native_dies_on_rank_0"]
            and figures["skew/flex_finishes"]
            and figures["skew/loss_error"] <= BOUNDS["skew_loss_error"]
            and figures["skew/other_ranks_keep_all"]
        )
    if "wire/step_ratio" in figures:
        meets["3"] = (
            figures["wire/dispatch_bytes_ratio"] <= BOUNDS["wire_bytes_ratio"]
            and max(figures["wire/step_ratio"], figures["wire/managed_step_ratio"]) <= BOUNDS["wire_step_ratio"]
        )
    if "loopback/managed_step_ratio" in figures:
        meets["4"] = figures["loopback/managed_step_ratio"] <= BOUNDS["loopback_step_ratio"]
    return meets


def quick(shape: BenchShape) -> BenchShape:
    return replace(shape, config={**shape.config, "num_hidden_layers": 2}, batch_size=2, sequence_length=128)


def measure_wire(shape: BenchShape, num_rounds: int, console: Console) -> dict[str, Any]:
    """Figures of requirement 3. Without two hosts, no figure but the reason."""
    reason = why_no_hosts()
    if reason is not None:
        console.print(f"wire: skipped; {reason}", highlight=False)
        return {"skipped": reason}
    # The implementation alone, then with FlexTrainer, which has freed memory given back on a CPU: so have both then.
    alone = _in_turns(shape, num_rounds, console, is_managed=False, has_link=True)
    managed = _in_turns(shape, num_rounds, console, is_managed=True, has_link=True)
    return {**alone, **{f"managed_{key}": value for key, value in managed.items()}}


def measure_loopback(shape: BenchShape, num_rounds: int, console: Console) -> dict[str, Any]:
    """Figures of requirement 4."""
    managed = _in_turns(shape, num_rounds, console, is_managed=True, has_link=False)
    return {f"managed_{key}": value for key, value in managed.items()}


def _in_turns(
    shape: BenchShape, num_rounds: int, console: Console, *, is_managed: bool, has_link: bool
) -> dict[str, Any]:
    """Both implementations in turns: seconds, bytes, ratios."""
    where = f"over {RATE}" if has_link else "on loopback"
    manager = "FlexTrainer, keeping all," if is_managed else "its dispatch alone"
    console.print(f"speed: native and {manager} {where}, {num_rounds} steps of each in turns", highlight=False)
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="flex-bench-"))
        hosts = stack.enter_context(two_hosts(RATE)) if has_link else None
        arguments = {
            "path": str(write_model(shape, directory)),
            "batch_size": shape.batch_size,
            "sequence_length": shape.sequence_length,
            "implementations": [NATIVE, FLEX],
            "managed": [FLEX] if is_managed else [],
            "num_rounds": num_rounds,
            "returns_memory": is_managed,
        }
        results = run_ranks("flex_trainer.bench.ep_speed:in_turns", arguments, _NUM_RANKS, hosts=hosts)
    return _speed_figures(values_of(results, f"native and {manager} {where}"))


def _speed_figures(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """From what each rank has measured of each implementation."""
    seconds = {name: slowest(ranks, name, "seconds") for name in (NATIVE, FLEX)}
    cpu_seconds = {name: slowest(ranks, name, "cpu_seconds") for name in (NATIVE, FLEX)}
    link_bytes = {name: sum(statistics.median(rank[name]["link_bytes"]) for rank in ranks) for name in (NATIVE, FLEX)}
    dispatch_bytes = {name: sum(rank[name]["dispatch_bytes"] for rank in ranks) for name in (NATIVE, FLEX)}
    losses = [(rank[FLEX]["losses"], rank[NATIVE]["losses"]) for rank in ranks]
    return {
        "step_s": seconds,
        "cpu_s": cpu_seconds,
        "link_mib": {name: num_bytes / 2**20 for name, num_bytes in link_bytes.items()},
        "dispatch_mib": {name: num_bytes / 2**20 for name, num_bytes in dispatch_bytes.items()},
        "dispatch_bytes_ratio": dispatch_bytes[FLEX] / dispatch_bytes[NATIVE],
        "link_bytes_ratio": link_bytes[FLEX] / link_bytes[NATIVE],
        "cpu_ratio": cpu_seconds[FLEX] / cpu_seconds[NATIVE],
        "step_ratio": seconds[FLEX] / seconds[NATIVE],
        "loss_error": max(abs(mine - other) / abs(other) for pair in losses for mine, other in zip(*pair, strict=True)),
        "freed_bytes": sum(rank[FLEX]["freed_bytes"] for rank in ranks),
        "num_steps": len(ranks[0][FLEX]["seconds"]),
        "all_step_s": {name: [rank[name]["seconds"] for rank in ranks] for name in (NATIVE, FLEX)},
    }


def slowest(ranks: Sequence[Mapping[str, Any]], name: str, what: str) -> float:
    """Median over steps of the slowest rank's time."""
    return statistics.median(max(times) for times in zip(*(rank[name][what] for rank in ranks), strict=True))
