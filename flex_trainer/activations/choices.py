"""Which strategy an operator runs under, as the engine asks for it."""

from __future__ import annotations

from typing import Protocol

from flex_trainer.strategy import Site, Strategy


class Choices(Protocol):
    """Where a scope reads strategies from; they may change while forward runs."""

    def strategy(self, site: Site) -> Strategy: ...
