"""What the sizes of a micro-batch's activations depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchShape:
    """The shape of a micro-batch."""

    batch_size: int
    sequence_length: int
    kind: str = ""
    """Which inputs there are, dtype and autocast: what may change the operators themselves."""
    has_padding: bool = False
    """Whether the attention mask masks anything; one that does not is skipped, and attention then runs another way."""

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.sequence_length
