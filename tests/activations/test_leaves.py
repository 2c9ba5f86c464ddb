"""Leaves are those of torch's pytree, in its order."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten
from transformers.modeling_outputs import BaseModelOutputWithPast

from flex_trainer.activations.leaves import leaves_of, mapped, tensors_of

A, B, C = torch.zeros(1), torch.nn.Parameter(torch.zeros(2)), torch.zeros(3)
Pair = namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    "tree",
    [
        A,
        None,
        (A, None, [B, (C, 2.5)]),
        {"z": A, "a": (B, None), "m": {"k": C}},
        (Pair(A, [B]), OrderedDict(b=C, a=1), "text", torch.float32),
        BaseModelOutputWithPast(last_hidden_state=A, hidden_states=(B, C)),
        ([], (), {}, object),
        {1, 2},
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_leaves_are_those_of_pytree(tree: Any) -> None:
    wanted, got = tree_flatten(tree)[0], leaves_of(tree)
    assert len(got) == len(wanted) and all(mine is theirs for mine, theirs in zip(got, wanted, strict=True))


def test_tensors_of_a_call() -> None:
    found = tensors_of((A, 1, (B,)), {"mask": None, "states": {"k": C}})
    assert len(found) == 3 and found[0] is A and found[1] is B and found[2] is C


def test_what_user_dicts_hold_is_looked_at_and_copied() -> None:
    """Layers of Gemma 4 hand keys and values on in one."""
    given = UserDict(full=(A, C), sliding=B)
    assert leaves_of([given]) == [A, C, B]
    copied = mapped(lambda leaf: leaf * 1, given)
    copied["full"] = None
    assert type(copied) is UserDict and given["full"][0] is A and copied["sliding"] is not B
