"""Arguments of every form are copied with fakes inside; objects that a forward might change are refused."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import BatchEncoding, DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from flex_trainer.symbolic.arguments import with_fakes

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Features:
    input_ids: torch.Tensor
    name: str = "a"


def meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def test_containers_keep_their_class_and_the_originals_their_tensors() -> None:
    real = torch.zeros(2, 3)
    given: tuple[Any, ...] = (
        {"a": [real, (real, 1)]},
        BatchEncoding({"input_ids": real}),
        BaseModelOutput(last_hidden_state=real),  # type: ignore[arg-type]
        Pair(real, None),
        Features(real),
    )
    found = with_fakes(given, meta)
    assert [type(one) for one in found] == [type(one) for one in given]
    mapping, encoding, output, pair, features = found
    tensors = mapping["a"][0], mapping["a"][1][0], encoding["input_ids"], output.last_hidden_state, pair.first
    assert all(tensor.device.type == "meta" for tensor in (*tensors, features.input_ids))
    assert mapping["a"][1][1] == 1 and pair.second is None and features.name == "a"
    assert given[0]["a"][0] is real and given[1]["input_ids"] is real
    assert given[2].last_hidden_state is real and given[4].input_ids is real


@pytest.mark.parametrize("refused", [DynamicCache(), object(), {1}])
def test_other_objects_are_refused(refused: Any) -> None:
    with pytest.raises(TypeError, match=f"an argument is a {type(refused).__name__}, which the forward might change"):
        with_fakes([refused], meta)
