"""Shipped recipes and accelerate configurations, found by name, as in `recipe_path("demo")`."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent


def recipe_names() -> list[str]:
    """Names of the shipped recipes, sorted."""
    return sorted(path.stem for path in _HERE.glob("*.yaml"))


def accelerate_names() -> list[str]:
    """Names of the shipped accelerate configurations, sorted."""
    return sorted(path.stem for path in (_HERE / "accelerate").glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """File of the shipped recipe `name` (it may not exist; see `recipe_names`)."""
    return _HERE / f"{name}.yaml"


def accelerate_path(name: str) -> Path:
    """File of the shipped accelerate configuration `name` (it may not exist; see `accelerate_names`)."""
    return _HERE / "accelerate" / f"{name}.yaml"
