"""The command `flex-trainer`. Heavy libraries are imported inside the commands, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from flex_trainer import __version__
from flex_trainer.cli.accelerate_config import accelerate_config
from flex_trainer.cli.bench import bench
from flex_trainer.cli.doctor import doctor
from flex_trainer.cli.plan import plan
from flex_trainer.cli.profile import profile
from flex_trainer.cli.train import train
from flex_trainer.errors import user_mistakes_as_one_line

app = typer.Typer(
    name="flex-trainer",
    help="Mixture-of-Experts training that stays inside its memory limit.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train)
app.command("plan")(plan)
app.command("profile")(profile)
app.command("bench")(bench)
app.command("doctor")(doctor)
app.command("accelerate-config")(accelerate_config)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"flex-trainer {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Mixture-of-Experts training that stays inside its memory limit."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv` (default: this process's). A user's mistake is one line on stderr and exit code 2."""
    with user_mistakes_as_one_line():
        # Not `app(...)`: it leaves a hook for uncaught errors behind, and with that of W&B a traceback is shown twice.
        command = typer.main.get_command(app)
        command(args=None if argv is None else list(argv), prog_name="flex-trainer")
