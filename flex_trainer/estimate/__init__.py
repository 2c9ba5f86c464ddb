"""What a recipe needs per rank, before any launch and without weights: memory, a plan, and the time of a step."""

from __future__ import annotations

from flex_trainer.estimate.report import IMBALANCES, estimate_recipe

__all__ = ["IMBALANCES", "estimate_recipe"]
