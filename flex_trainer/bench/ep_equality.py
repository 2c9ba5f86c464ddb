"""Loss and gradients on several ranks against one process: tiny models of all families, in all meshes and cases."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from flex_trainer.bench.ep_equality_rank import CASES
from flex_trainer.bench.ep_model import MeshSizes, write_weights
from flex_trainer.testing.ranks import RankPool
from flex_trainer.testing.tiny import tiny_model

FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_moe", "mixtral", "gpt_oss", "ernie4_5_moe")
MESHES = (MeshSizes(2, 2), MeshSizes(4, 4), MeshSizes(2, 4), MeshSizes(2, 2, 2))
"""EP 2; EP 4; FSDP 4 x EP 2; FSDP 2 x EP 2 in two replicas (HSDP)."""
_JOB = "flex_trainer.bench.ep_equality_rank:compare"
_KEEPS = ("plain", "keep")
_TIMEOUT_S = 900.0

_Found = Mapping[str, Sequence[Mapping[str, Any]]]
"""By case: what each rank found."""


def measure_equality(meshes: Sequence[MeshSizes], families: Sequence[str], console: Console) -> dict[str, Any]:
    """Figures of requirement 1. In replicas, the first family alone.

    Returns:
        For each mesh and case the largest relative errors over families; those of all, quantize apart; and whether
        every strategy has given memory back where it was asked to.
    """
    found: dict[tuple[str, str], _Found] = {}
    with tempfile.TemporaryDirectory(prefix="flex-bench-") as directory:
        for family in families:
            write_weights(tiny_model(family), Path(directory) / family)
        for mesh in meshes:
            with RankPool(mesh.num_ranks, _TIMEOUT_S) as ranks:
                for family in families[:1] if mesh.dp_replicate_size > 1 else families:
                    console.print(f"equality: {mesh.title}, {family}, {len(CASES)} cases", highlight=False)
                    path = str(Path(directory) / family)
                    answers = ranks.run(_JOB, path=path, mesh=list(mesh), cases=list(CASES))
                    found[mesh.title, family] = {case: [answer[case] for answer in answers] for case in CASES}
    return equality_figures(found)


def equality_figures(found: Mapping[tuple[str, str], _Found]) -> dict[str, Any]:
    """From what the ranks found, by the title of the mesh and the family."""
    figures: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for (title, family), cases in found.items():
        for case, ranks in cases.items():
            worst = max(ranks, key=lambda rank: rank["gradient_error"])
            loss_error = max(rank["loss_error"] for rank in ranks)
            details.setdefault(title, {}).setdefault(family, {})[case] = {
                **worst,
                "loss_error": loss_error,
                "freed_bytes": [rank["freed_bytes"] for rank in ranks],
            }
            key = f"{title}/{case}"
            figures[key] = max(figures.get(key, 0.0), worst["gradient_error"])
    flat = [(case, rank) for cases in found.values() for case, ranks in cases.items() for rank in ranks]
    exact = [rank for case, rank in flat if case != "quantize"]
    return {
        **figures,
        "num_cases": sum(len(cases) for cases in found.values()),
        "worst_loss_error": max(rank["loss_error"] for _, rank in flat),
        "worst_gradient_error": max(rank["gradient_error"] for rank in exact),
        "worst_quantize_gradient_error": max(
            (rank["gradient_error"] for case, rank in flat if case == "quantize"), default=0.0
        ),
        "strategies_free_memory": all(
            (sum(rank["freed_bytes"] for rank in ranks) > 0) == (case not in _KEEPS)
            for cases in found.values()
            for case, ranks in cases.items()
        ),
        "details": details,
    }
