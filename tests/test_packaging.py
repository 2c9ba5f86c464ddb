"""What would be installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_package_is_listed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    places = {"flex_trainer.callbacks": "callbacks", "flex_trainer.recipes": "recipes"}
    found = set(places)
    for init in (ROOT / "flex_trainer").rglob("__init__.py"):
        found.add(".".join(init.parent.relative_to(ROOT).parts))
    assert sorted(found) == sorted(setuptools["packages"])
    assert setuptools["package-dir"] == {"flex_trainer": "flex_trainer", **places}


def test_directories_with_code_are_packages() -> None:
    for file in (ROOT / "flex_trainer").rglob("*.py"):
        assert (file.parent / "__init__.py").is_file(), f"{file.parent} needs an __init__.py"


def test_callbacks_and_recipes_live_in_the_package_only(tmp_path: Path) -> None:
    code = (
        "import importlib.util as u; import flex_trainer.callbacks, flex_trainer.recipes as r;"
        "print(r.recipe_path('demo').is_file(), u.find_spec('callbacks'), u.find_spec('recipes'))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "None", "None"]
