"""What is replaced on an object comes back exactly, in whatever order the replacements are undone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn

from flex_trainer.undo import replace_attribute


class Thing:
    def value(self) -> str:
        return "class"


def replaced(thing: Any, name: str, new: Any = None) -> Callable[[], None]:
    return replace_attribute(thing, "value", new or (lambda: name))


def test_the_classs_attribute_is_uncovered() -> None:
    thing = Thing()
    undo = replaced(thing, "new")
    assert thing.value() == "new"
    undo()
    assert thing.value() == "class" and vars(thing) == {}
    undo()  # twice is as good as once
    assert vars(thing) == {}


def test_the_instances_own_attribute_comes_back() -> None:
    thing = Thing()
    own = lambda: "own"  # noqa: E731 - the very object must come back
    thing.value = own  # type: ignore[method-assign]
    undo = replaced(thing, "new")
    undo()
    assert vars(thing) == {"value": own}


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_any_order(order: tuple[int, ...]) -> None:
    thing = Thing()
    undo = [replaced(thing, str(number)) for number in range(3)]
    left = {0, 1, 2}
    for number in order:
        undo[number]()
        left.remove(number)
        assert thing.value() == (str(max(left)) if left else "class")
    assert vars(thing) == {}


def test_what_others_put_on_top_stays() -> None:
    thing = Thing()
    first = replaced(thing, "first")
    earlier = thing.value
    thing.value = lambda: f"theirs over {earlier()}"  # type: ignore[method-assign]
    theirs = vars(thing)["value"]
    second = replaced(thing, "second")
    first()
    assert thing.value() == "second"
    second()
    assert vars(thing) == {"value": theirs}


def test_a_module_that_stands_where_a_function_goes() -> None:
    """nn.Module files modules among its children and refuses a function in the place of one."""
    owner = nn.Module()
    loss = nn.CrossEntropyLoss()
    owner.loss = loss
    undo = replace_attribute(owner, "loss", print)
    assert owner.loss is print
    undo()
    assert owner.loss is loss and "loss" not in vars(owner)


def test_a_deep_copy_has_nothing_replaced() -> None:
    module = nn.Linear(2, 2)
    replace_attribute(module, "forward", lambda x: x)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    assert twin(torch.ones(1, 2)).tolist() == [[0.0, 0.0]]
    assert module(torch.ones(1, 2)).tolist() == [[1.0, 1.0]]
    assert copy.deepcopy(twin)(torch.ones(1, 2)).tolist() == [[0.0, 0.0]]
