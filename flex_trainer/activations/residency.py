"""Which weights are there when: what the engine has to know of models whose weights come and go."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch


class Residency(Protocol):
    """Sites are given by name."""

    def weights(self, site: str) -> Iterable[torch.Tensor]:
        """The weights that a site computes with, as plain tensors; asked for when it begins to run."""
        ...

    def is_whole(self, site: str, saver: str) -> bool:
        """Whether `site` can be run again while the backward of the operator `saver` runs."""
        ...
