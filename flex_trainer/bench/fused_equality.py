"""Requirement 1 of `flex-trainer bench fused`: tiny models of six families, on two and on four ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from flex_trainer.bench.ep_model import MeshSizes, write_weights
from flex_trainer.bench.fused_equality_rank import CHOICES
from flex_trainer.testing.ranks import RankPool
from flex_trainer.testing.tiny import tiny_model

FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_moe", "mixtral", "gpt_oss", "granitemoe")
MESHES = (MeshSizes(2, 2), MeshSizes(2, 4))
"""EP 2; FSDP 2 x EP 2: experts in shards of two ranks."""
ACCUMULATIONS = (2, 3, 4, 8)
_JOB = "flex_trainer.bench.fused_equality_rank:differences"
_TIMEOUT_S = 600.0
_DROPOUT = {"attention_dropout": 0.2, "attn_implementation": "eager"}
_VARIANTS: dict[str, dict[str, Any]] = {
    "dropout": {"choices": "recomputed_dispatch", "options": _DROPOUT},
    "bfloat16 autocast": {"choices": "mixed", "has_autocast": True},
    "uneven lengths": {"choices": "recomputed_dispatch", "is_uneven": True},
    "a rank without tokens": {"choices": "mixed", "is_skewed": True},
    "planned": {"choices": None},
}


def measure_equality(console: Console, *, is_quick: bool) -> dict[str, Any]:
    """Every family under every choice, with windows of 2, 3, 4 and 8 in turns, and in five more variants.

    Returns:
        How many cases there were, and in how many anything differed; which.
    """
    different: dict[str, list[str]] = {}
    num_cases = num_pairs = 0
    with tempfile.TemporaryDirectory(prefix="flex-bench-") as directory:
        for family in FAMILIES[: 1 if is_quick else None]:
            write_weights(tiny_model(family), Path(directory) / family)
        for mesh in MESHES[: 1 if is_quick else None]:
            with RankPool(mesh.num_ranks, _TIMEOUT_S) as ranks:
                for number, family in enumerate(FAMILIES[: 1 if is_quick else None]):
                    console.print(f"equality: {mesh.title}, {family}", highlight=False)
                    cases = {name: {"choices": name} for name in CHOICES} | _VARIANTS
                    for turn, (name, case) in enumerate(cases.items()):
                        accumulation = ACCUMULATIONS[(number + turn) % len(ACCUMULATIONS)]
                        job: dict[str, Any] = {
                            "path": str(Path(directory) / family),
                            "mesh": list(mesh),
                            "num_steps": 2 if is_quick else 5,
                            "accumulation": accumulation,
                            **case,
                        }
                        answers = ranks.run(_JOB, **job)
                        num_cases += 1
                        num_pairs += answers[0]["num_pairs"]
                        names = [one for answer in answers for one in answer["different"]]
                        if names or not answers[0]["num_pairs"]:
                            title = f"{mesh.title}, {family}, {name}, {accumulation} micro-batches"
                            different[title] = names or ["nothing ran together"]
    return {
        "num_cases": num_cases,
        "num_different": len(different),
        "num_pairs": num_pairs,
        "different": different,
    }
