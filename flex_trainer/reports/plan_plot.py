"""An estimate as a picture: memory of the fullest rank, bar by bar, against the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flex_trainer.errors import UserError

_WAYS = {
    "plan": "plan",
    "keep_all": "keep all",
    "full_checkpointing": "checkpointing",
    "offload_everything": "offload all",
}
# The Okabe-Ito colours, as on the report page.
_PARTS = (
    ("parameters", "parameters_bytes", "#56789a"),
    ("optimizer", "optimizer_bytes", "#8a94a3"),
    ("gradients", "gradients_in_base_bytes", "#aa5f93"),
    ("gathered weights", "gathered_bytes", "#d3d9e0"),
    ("gradient buckets", "buckets_bytes", "#c9b1c4"),
    ("activations", "activations_bytes", "#0072b2"),
    ("transients", "transients_bytes", "#e69f00"),
)
_GIB = 2**30
_TALLEST = 2.5
"""Bars are cut off at this many times what is available."""


def write_plan_plot(result: dict[str, Any], path: Path) -> Path:
    """Draw the estimate; the kind of file follows from its name.

    Raises:
        ValueError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("--plot needs matplotlib, which is not installed: pip install matplotlib") from error
    bars = [
        (f"{row['imbalance']:g}\n{title}", row[way]["stages"][row[way]["worst_stage"]])
        for row in result["imbalances"]
        for way, title in _WAYS.items()
    ]
    figure = Figure(figsize=(max(6.0, 0.9 * len(bars) + 2.5), 4.8), layout="constrained")
    axes = figure.add_subplot()
    heights = [0.0] * len(bars)
    for title, key, colour in _PARTS:
        sizes = [_part(stage, key) / _GIB for _, stage in bars]
        if any(sizes):
            axes.bar(range(len(bars)), sizes, bottom=heights, color=colour, label=title, width=0.72)
            heights = [height + size for height, size in zip(heights, sizes, strict=True)]
    available = result["imbalances"][0]["plan"]["available_bytes"] / _GIB
    tallest = _TALLEST * available
    for number, height in enumerate(heights):
        if height > tallest:  # a run that is far from fitting would flatten the others
            axes.text(number, tallest, f"{height:,.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, min(max([*heights, available]) * 1.08, tallest))
    axes.axhline(available, color="#b3261e", linestyle="--", linewidth=1.2, label="available")
    axes.set_xticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axes.set_xlabel("imbalance and way to run")
    axes.set_ylabel("GiB at the highest point of the fullest rank")
    axes.set_title(f"{result['recipe']} on {result['mesh']['ranks']} x {result['hardware']['title']}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"the plot cannot be written to {str(path)!r}: {error.strerror or error}") from error
    return path


def _part(stage: dict[str, Any], key: str) -> int:
    if key != "gradients_in_base_bytes":
        return stage[key]
    # With a single micro-batch the gradients grow while activations fall: they are among the transients.
    fixed = ("parameters_bytes", "optimizer_bytes", "gathered_bytes", "buckets_bytes")
    return stage["base_bytes"] - sum(stage[name] for name in fixed)
