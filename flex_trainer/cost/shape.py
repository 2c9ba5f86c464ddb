"""What the sizes of a micro-batch's activations depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchShape:
    """The shape of a micro-batch."""

    batch_size: int
    sequence_length: int
    kind: str = ""
    """Which inputs there are, dtype, autocast, what is trained and how it runs: what may change the operators."""
    has_padding: bool = False
    """Whether the attention mask masks anything; one that does not is skipped, and attention then runs another way."""
    is_told: bool = True
    """Whether the inputs tell their sizes. If not, this is like no other micro-batch: nothing known holds for it, and
    nothing is learnt from it."""

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.sequence_length
