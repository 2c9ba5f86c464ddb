"""Which inputs make micro-batches of one kind, and which do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flex_trainer.models.inputs import shape_of


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
