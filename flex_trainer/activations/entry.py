"""What a scope knows of one storage."""

from __future__ import annotations

import weakref
from typing import Any

from flex_trainer.activations.region import Region
from flex_trainer.activations.values import Holding, StoredValue
from flex_trainer.strategy import Strategy


class Entry:
    """What the scope knows of one storage."""

    __slots__ = (
        "holding",
        "dropped_bytes",
        "is_counted",
        "is_router_output",
        "num_bytes",
        "owner",
        "pins",
        "region",
        "strategy",
        "stored",
        "value",
        "version",
    )

    def __init__(self, owner: int, strategy: Strategy, value: int, version: int, num_bytes: int) -> None:
        self.owner = owner
        self.strategy = strategy
        self.value = value
        self.version = version
        self.num_bytes = num_bytes
        self.region: tuple[Region, int] | None = None  # (region, output index) when it is a recomputed output
        self.holding: weakref.ref[Holding] | None = None
        self.stored: weakref.ref[StoredValue] | None = None
        self.is_counted = False  # in the ledger's demand
        self.is_router_output = False
        self.dropped_bytes = 0  # in the ledger's freed bytes, since a recomputation brings them back
        self.pins: list[weakref.ref[Any]] | None = None  # alive as long as anything packed of this storage is

    @property
    def is_pinned(self) -> bool:
        """Whether autograd holds anything of this storage."""
        return self.pins is not None and any(pin() is not None for pin in self.pins)

    def pin(self, reference: weakref.ref[Any]) -> None:
        """Autograd holds something of this storage for as long as this is alive."""
        if self.pins is None:
            self.pins = [reference]
        else:
            self.pins.append(reference)


def keeps_nothing(entry: Entry) -> bool:
    """Whether what is known of the storage keeps no other tensors alive."""
    return entry.region is None
