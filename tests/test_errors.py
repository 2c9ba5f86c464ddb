"""Whose mistake an error is, and how it is shown."""

from __future__ import annotations

import json

import pytest

from flex_trainer.config import FlexConfig
from flex_trainer.errors import is_user_mistake, user_mistakes_as_one_line


def caught_from(action) -> BaseException:
    with pytest.raises(BaseException) as caught:
        action()
    return caught.value


def test_our_value_errors_are_the_users_mistakes() -> None:
    assert is_user_mistake(caught_from(lambda: FlexConfig(memory_limit=-1)))


def test_a_librarys_are_not() -> None:
    assert not is_user_mistake(caught_from(lambda: json.loads("{")))
    assert not is_user_mistake(caught_from(lambda: [].index(1)))
    assert not is_user_mistake(KeyError("x"))


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
