"""Help is quick: it imports no heavy library."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMANDS = ("train", "plan", "profile", "bench", "doctor", "accelerate-config")
CODE = """
import sys
from flex_trainer.cli import main
try:
    main(sys.argv[1:])
except SystemExit as exit_:
    heavy = [name for name in ("torch", "transformers", "accelerate", "datasets", "wandb", "matplotlib", "numpy")
             if name in sys.modules]
    print("exit", exit_.code, "heavy", heavy)
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    result = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "exit 0 heavy []"
    assert len(result.stdout.splitlines()) > 1


def test_a_mistake_in_a_recipe_is_told_before_anything_heavy_is_imported() -> None:
    arguments = ["train", "demo", "flex.memory_limt=1GiB"]
    result = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "exit 2 heavy []"
    assert result.stderr == "Error: demo.yaml: flex.memory_limt: unknown key; did you mean 'memory_limit'?\n"


def test_python_m_flex_trainer() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "flex_trainer", "--version"], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("flex-trainer ")


def test_an_error_is_shown_once() -> None:
    """W&B puts a hook of its own for uncaught errors before one that is there: there must be none."""
    program = (
        "import sys; import flex_trainer.cli as cli; from flex_trainer.launch import recipe\n"
        "def broken(*_): raise ArithmeticError('a defect')\n"
        "recipe.load_recipe = broken\n"
        "try: cli.main(['plan', 'demo'])\n"
        "except ArithmeticError: print(sys.excepthook is sys.__excepthook__)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert result.stdout == "True\n", result.stderr
