"""Options of an optimizer and lists of a scheduler in other groups than those they were saved in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_constant_schedule_with_warmup

from flex_trainer.checkpoint.groups import SavedGroups
from flex_trainer.errors import UserError


def _optimizer(*groups: tuple[list[torch.Tensor], float]) -> torch.optim.AdamW:
    return torch.optim.AdamW([{"params": of, "weight_decay": decay} for of, decay in groups], lr=1.0)


def _scheduler(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return get_constant_schedule_with_warmup(optimizer, num_warmup_steps=4)


def _named(*names: str) -> dict[torch.Tensor, str]:
    return {torch.nn.Parameter(torch.ones(2)): name for name in names}


def test_options_follow_their_parameters(tmp_path: Path) -> None:
    names = _named("dense", "norm", "experts")
    dense, norm, experts = names
    optimizer = _optimizer(([dense], 0.1), ([experts], 0.1), ([norm], 0.0))
    optimizer.param_groups[2]["lr"] = 0.25
    SavedGroups.of(optimizer, names).save(tmp_path)
    saved = SavedGroups.load(tmp_path)
    assert saved.options(["dense", "experts"])["weight_decay"] == 0.1
    assert saved.options(["norm"])["lr"] == 0.25
    assert "params" not in saved.options(["norm"])
    assert saved.options([]) == {}


def test_options_that_differ_do_not_fit_one_group() -> None:
    names = _named("dense", "norm")
    dense, norm = names
    saved = SavedGroups.of(_optimizer(([dense], 0.1), ([norm], 0.0)), names)
    with pytest.raises(UserError, match="'dense' and 'norm' into one group.* different weight_decay"):
        saved.options(["dense", "norm"])


def test_a_parameter_that_was_not_trained() -> None:
    names = _named("dense")
    saved = SavedGroups.of(_optimizer(([*names], 0.1)), names)
    with pytest.raises(UserError, match="no optimizer options for 1 parameters, 'experts'"):
        saved.options(["dense", "experts"])


@pytest.mark.parametrize("is_split_when_saved", [True, False])
def test_a_schedule_goes_on_in_every_group(is_split_when_saved: bool) -> None:
    """Torch takes the saved lists as they are: with fewer groups than before it fails, with more it leaves some out."""
    names = _named("dense", "norm", "experts")
    dense, norm, experts = names
    split = _optimizer(([dense], 0.1), ([experts], 0.1), ([norm], 0.0))
    joined = _optimizer(([dense, experts], 0.1), ([norm], 0.0))
    before, after = (split, joined) if is_split_when_saved else (joined, split)
    before_scheduler, after_scheduler = _scheduler(before), _scheduler(after)
    for _ in range(2):
        before.step()
        before_scheduler.step()
    saved = SavedGroups.of(before, names)
    groups = [[names[parameter] for parameter in group["params"]] for group in after.param_groups]
    after_scheduler.load_state_dict(saved.regroup(before_scheduler.state_dict(), groups))
    for group, of in zip(after.param_groups, groups, strict=True):
        group.update(saved.options(of))
    after.step()
    after_scheduler.step()
    assert [group["lr"] for group in after.param_groups] == [0.75] * len(after.param_groups)
    assert len(after_scheduler.base_lrs) == len(after.param_groups)


def test_the_same_groups_take_the_state_as_it_is() -> None:
    names = _named("dense")
    saved = SavedGroups.of(_optimizer(([*names], 0.1)), names)
    state = {"milestones": [3], "base_lrs": [1.0]}
    assert saved.regroup(state, [["dense"]]) is state
