"""Whose mistake an error is, and how it is shown."""

from __future__ import annotations

import json

import pytest

from flex_trainer import MemoryLimitError
from flex_trainer.config import FlexConfig
from flex_trainer.errors import UserError, user_mistakes_as_one_line
from flex_trainer.launch.yaml import RecipeError
from flex_trainer.units import parse_bytes


def test_what_is_refused_on_purpose_is_a_value_error_of_its_own_class() -> None:
    assert issubclass(UserError, ValueError)
    assert issubclass(RecipeError, UserError) and issubclass(MemoryLimitError, UserError)
    with pytest.raises(UserError, match="memory_limit=-1"):
        FlexConfig(memory_limit=-1)
    with pytest.raises(UserError, match="is not a size"):
        parse_bytes("twelve")


@pytest.mark.parametrize("error", [ValueError("list.index(x): x not in list"), OSError(5, "broken"), KeyError("x")])
def test_a_defect_keeps_its_traceback(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one of our own: what counts is that it is meant for the user, not which file it came from."""
    with pytest.raises(type(error)) as caught, user_mistakes_as_one_line():
        raise error
    assert caught.value is error
    assert capsys.readouterr().err == ""


def test_one_line_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_, user_mistakes_as_one_line():
        FlexConfig(strategies=("ofload",))
    assert exit_.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "Error: unknown strategy 'ofload' in strategies; did you mean 'offload'?\n"


def test_the_rank_is_named_where_there_are_several(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit), user_mistakes_as_one_line():
        FlexConfig(planner="best")
    assert capsys.readouterr().err.startswith("Error (rank 1): planner='best'")


def test_other_errors_pass_and_a_traceback_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(json.JSONDecodeError), user_mistakes_as_one_line():
        json.loads("{")
    monkeypatch.setenv("FLEX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="planner"), user_mistakes_as_one_line():
        FlexConfig(planner="best")
