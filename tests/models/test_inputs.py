"""Which inputs make micro-batches of one kind, and which do not."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, make_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BatchEncoding, DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from flex_trainer.models.inputs import Inputs, shape_of
from flex_trainer.testing.tiny import tiny_model


def shape(batch_size: int, length: int, **more: torch.Tensor | bool) -> Any:
    ids = torch.zeros(batch_size, length, dtype=torch.long)
    return shape_of((), {"input_ids": ids, "labels": ids, **more})


GROWING = {
    "positions for all rows": lambda b, s: {"position_ids": torch.arange(s)[None]},
    "multimodal rotary positions": lambda b, s: {"position_ids": torch.zeros(3, b, s)},
    "mask of length x length": lambda b, s: {"attention_mask": torch.zeros(b, 1, s, s)},
    "mask shared by rows": lambda b, s: {"attention_mask": torch.zeros(1, 1, s, s)},
    "embeddings beside ids": lambda b, s: {"vectors": torch.zeros(b, s, 8)},
}


@pytest.mark.parametrize("name", GROWING)
def test_inputs_that_grow_with_the_batch_are_one_kind(name: str) -> None:
    shapes = [shape(b, s, **GROWING[name](b, s)) for b, s in ((2, 16), (2, 40), (4, 16), (4, 77))]
    assert len({found.kind for found in shapes}) == 1
    assert [(found.batch_size, found.sequence_length) for found in shapes] == [(2, 16), (2, 40), (4, 16), (4, 77)]


def test_the_kind_still_tells_their_forms_apart() -> None:
    forms = [GROWING[name](2, 16) for name in GROWING]
    assert len({shape(2, 16, **form).kind for form in forms}) == len(forms)


def test_sizes_of_their_own_make_kinds_of_their_own() -> None:
    images = [shape(2, 16, pixel_values=torch.zeros(n, 3, 8, 8)).kind for n in (5, 6)]
    assert images[0] != images[1] and "pixel_values=(5,3,8,8)" in images[0]
    # Scalars and vectors (num_items_in_batch, cumulative lengths) do not.
    assert shape(2, 16, lengths=torch.zeros(5)).kind == shape(2, 16, lengths=torch.zeros(6)).kind


def test_padding_flags_and_autocast_tell_batches_apart() -> None:
    mask = torch.ones(2, 16, dtype=torch.long)
    padded = mask.clone()
    padded[0, 0] = 0
    shapes = [
        shape(2, 16),
        shape(2, 16, attention_mask=mask),
        shape(2, 16, attention_mask=padded),
        shape(2, 16, use_cache=False),
    ]
    with torch.autocast("cpu", torch.bfloat16):
        shapes.append(shape(2, 16))
    assert len(set(shapes)) == len(shapes)
    assert [s.has_padding for s in shapes] == [False, False, True, False, False]


@dataclass
class Features:
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    task: str = "retrieval"


class Slotted:
    __slots__ = ("input_ids",)

    def __init__(self, input_ids: torch.Tensor) -> None:
        self.input_ids = input_ids


Pair = namedtuple("Pair", "input_ids attention_mask")


def ids(batch_size: int, length: int) -> torch.Tensor:
    return torch.zeros(batch_size, length, dtype=torch.long)


def ones(batch_size: int, length: int) -> torch.Tensor:
    return torch.ones(batch_size, length, dtype=torch.long)


CONTAINERS: dict[str, Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "dict": lambda b, s: (({"input_ids": ids(b, s), "attention_mask": ones(b, s)},), {}),
    "dict by name": lambda b, s: ((), {"features": {"input_ids": ids(b, s), "attention_mask": ones(b, s)}}),
    "list": lambda b, s: (([ids(b, s), ones(b, s)],), {}),
    "dataclass": lambda b, s: ((Features(ids(b, s), ones(b, s)),), {}),
    "BatchEncoding": lambda b, s: ((BatchEncoding({"input_ids": ids(b, s), "attention_mask": ones(b, s)}),), {}),
    "ModelOutput": lambda b, s: ((), {"hidden": BaseModelOutput(last_hidden_state=torch.zeros(b, s, 8))}),  # type: ignore[arg-type]
    "named tuple": lambda b, s: ((Pair(ids(b, s), ones(b, s)),), {}),
    "nested": lambda b, s: (([{"student": UserDict(inputs=Features(ids(b, s), ones(b, s)))}],), {}),
    "object": lambda b, s: ((make_dataclass("O", [])(),), {"batch": Slotted(ids(b, s))}),
    "embeddings only": lambda b, s: ((), {"inputs_embeds": torch.zeros(b, s, 32)}),
    "by position": lambda b, s: ((ids(b, s), ones(b, s)), {}),
    "array": lambda b, s: ((), {"input_ids": np.zeros((b, s), dtype=np.int64)}),
    "lists of numbers": lambda b, s: ((), {"input_ids": [[0] * s for _ in range(b)]}),
    "images beside ids": lambda b, s: ((), {"pixel_values": torch.zeros(6, 3, 8, 8), "input_ids": ids(b, s)}),
    "positions only": lambda b, s: ((), {"position_ids": torch.arange(s).expand(b, s)}),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_inputs_are_found_in_any_container(name: str) -> None:
    shapes = [shape_of(*CONTAINERS[name](b, s)) for b, s in ((2, 16), (2, 40), (4, 77))]
    assert [(found.batch_size, found.sequence_length) for found in shapes] == [(2, 16), (2, 40), (4, 77)]
    assert len({found.kind for found in shapes}) == 1
    assert all(found.is_told for found in shapes)


@pytest.mark.parametrize("name", [name for name in CONTAINERS if "attention_mask" in str(CONTAINERS[name](1, 2))])
def test_padding_is_seen_in_any_container(name: str) -> None:
    args, kwargs = CONTAINERS[name](2, 16)
    assert not shape_of(args, kwargs).has_padding

    def pad(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            value[0, 0] = 0
        elif isinstance(value, (dict, UserDict)):
            for item in value.values():
                pad(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                pad(item)
        elif not isinstance(value, str):
            pad(vars(value))

    pad([args, kwargs])
    assert shape_of(args, kwargs).has_padding


def test_one_row_without_a_batch_dimension_is_as_long_as_it_is() -> None:
    found = [shape_of((), {"input_ids": torch.zeros(n, dtype=torch.long)}) for n in (16, 77)]
    assert [(one.batch_size, one.sequence_length) for one in found] == [(1, 16), (1, 77)]


def test_nested_tensors_have_the_tokens_of_all_rows() -> None:
    found = [
        shape_of(
            (),
            {"inputs_embeds": torch.nested.nested_tensor([torch.zeros(n, 8), torch.zeros(5, 8)], layout=torch.jagged)},
        )
        for n in (3, 9)
    ]
    assert [one.num_tokens for one in found] == [8, 14]


def test_sizes_that_the_main_input_does_not_tell_are_part_of_the_kind() -> None:
    images = [shape_of((), {"pixel_values": torch.zeros(2, 3, size, size)}) for size in (8, 16)]
    assert images[0] != images[1]
    towers = [shape_of((), {"query": {"input_ids": ids(2, 8)}, "passage": {"input_ids": ids(2, n)}}) for n in (16, 64)]
    assert towers[0] != towers[1]
    widths = [shape(2, 16, vectors=torch.zeros(2, 16, width)) for width in (8, 24)]
    assert widths[0] != widths[1]
    rows = [shape(2, 16, patches=torch.zeros(n)) for n in (100, 200)]
    assert rows[0] != rows[1], "longer than there are tokens: no list of lengths"
    assert shape(2, 16, logits_to_keep=1) != shape(2, 16, logits_to_keep=0)  # type: ignore[arg-type]
    assert shape(2, 16, num_items_in_batch=31) == shape(2, 16, num_items_in_batch=7)  # type: ignore[arg-type]


def test_inputs_that_require_gradients_are_another_kind() -> None:
    vectors = torch.zeros(2, 16, 8)
    before = shape_of((), {"inputs_embeds": vectors})
    assert shape_of((), {"inputs_embeds": vectors.requires_grad_()}) != before


def test_a_cache_is_read_like_any_object() -> None:
    shapes = []
    for length in (4, 12):
        cache = DynamicCache()
        cache.update(torch.zeros(2, 2, length, 8), torch.zeros(2, 2, length, 8), 0)
        shapes.append(shape_of((), {"input_ids": ids(2, 16), "past_key_values": cache}))
    assert shapes[0] != shapes[1] and all(one.is_told for one in shapes)


def texts() -> Iterator[str]:
    yield "a"


@pytest.mark.parametrize(
    "untold",
    [texts(), ["a text", "another"], "a text " * 100, {1, 2}, object(), torch.eye(3).to_sparse()],
    ids=["generator", "texts", "long text", "set", "bare object", "sparse"],
)
def test_what_cannot_be_told_is_told(untold: Any) -> None:
    found = shape_of((), {"input_ids": ids(2, 16), "more": {"inside": untold}})
    assert (found.batch_size, found.sequence_length) == (2, 16) and not found.is_told


def test_no_inputs_at_all_tell_nothing() -> None:
    assert not shape_of((), {}).is_told
    assert not shape_of((), {"step": 3, "temperature": torch.tensor(1.0)}).is_told


def test_what_contains_itself_is_not_read_for_ever() -> None:
    loop: dict[str, Any] = {"input_ids": ids(2, 16)}
    loop["self"] = loop
    assert not shape_of((loop,), {}).is_told


def test_arguments_by_position_have_the_names_of_the_forward() -> None:
    inputs = Inputs(tiny_model("mixtral"))
    mask = ones(2, 16)
    mask[0, 0] = 0
    by_position, by_name = (
        inputs.shape_of((ids(2, 16), mask), {}),
        inputs.shape_of((), {"input_ids": ids(2, 16), "attention_mask": mask}),
    )
    assert by_position == by_name and by_position.has_padding

    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.inner(*args, **kwargs)

    assert Inputs(Wrapper(tiny_model("mixtral"))).shape_of((ids(2, 16), mask), {}).has_padding
