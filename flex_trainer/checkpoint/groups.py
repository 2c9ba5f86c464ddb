"""An optimizer's options by parameter name, so that they fit other groups than those they were saved in.

Trainer makes one group for each device mesh and weight decay: two in one process, four under FSDP and EP.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flex_trainer.errors import UserError

GROUPS_FILE = "optimizer_groups.pt"


@dataclass(frozen=True)
class SavedGroups:
    """The groups of an optimizer: its options, with the names of the parameters under `params`."""

    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> SavedGroups:
        return cls([{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups])

    @classmethod
    def load(cls, directory: Path) -> SavedGroups:
        return cls(torch.load(directory / GROUPS_FILE, weights_only=True))

    def save(self, directory: Path) -> None:
        torch.save(self.groups, directory / GROUPS_FILE)

    def options(self, names: list[str]) -> dict[str, Any]:
        """Options of a group of these parameters; none for an empty one.

        Raises:
            ValueError: a parameter that no saved group has, or parameters of groups with different options.
        """
        found = [self.groups[number] for number in self._numbers(names)]
        options = [{key: value for key, value in group.items() if key != "params"} for group in found]
        if any(other != options[0] for other in options[1:]):
            different = sorted(key for key in options[0] if any(other.get(key) != options[0][key] for other in options))
            raise UserError(
                f"the optimizer puts {names[0]!r} and {names[-1]!r} into one group; in the checkpoint they have "
                f"different {', '.join(different)}. Resume with the optimizer settings of the run that saved it."
            )
        return options[0] if options else {}

    def regroup(self, state: dict[str, Any], groups: list[list[str]]) -> dict[str, Any]:
        """A scheduler's state for other groups: what it has a list of with one item a group is put in their order.

        Args:
            state: of a scheduler, when it was saved.
            groups: names of the parameters in each group now.
        """
        numbers = [min(self._numbers(names), default=0) for names in groups]
        if numbers == list(range(len(self.groups))):
            return state
        return {
            key: [value[number] for number in numbers]
            if isinstance(value, list) and len(value) == len(self.groups)
            else value
            for key, value in state.items()
        }

    def _numbers(self, names: list[str]) -> list[int]:
        numbers = {name: number for number, group in enumerate(self.groups) for name in group["params"]}
        missing = [name for name in names if name not in numbers]
        if missing:
            raise UserError(
                f"the checkpoint has no optimizer options for {len(missing)} parameters, {missing[0]!r} for one: they "
                "were not trained. Train the same parameters as the run that saved it."
            )
        return sorted({numbers[name] for name in names})
