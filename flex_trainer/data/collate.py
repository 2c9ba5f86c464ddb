"""Samples of one micro-batch to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100  # the value cross-entropy skips in every transformers model


@dataclass(frozen=True)
class CausalCollator:
    """Pads to the longest sample and makes labels for next-token prediction (the model shifts them itself).

    Gives `input_ids`, `attention_mask` and `labels`, each int64 of shape (batch, longest); padding has the label -100.
    """

    pad_token_id: int

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        rows = [torch.as_tensor(sample["input_ids"], dtype=torch.long) for sample in samples]
        longest = max(len(row) for row in rows)
        input_ids = torch.full((len(rows), longest), self.pad_token_id, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        labels = torch.full_like(input_ids, IGNORED_LABEL)
        for index, row in enumerate(rows):
            input_ids[index, : len(row)] = row
            attention_mask[index, : len(row)] = 1
            labels[index, : len(row)] = row
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
