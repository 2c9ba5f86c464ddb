"""Load balancing without an auxiliary loss: a bias on each expert's score, moved after every optimizer step.

DeepSeek-V3 (arXiv 2412.19437, section 2.1.2; Wang et al., arXiv 2408.15664) chooses experts by score + bias and weighs
them by the score alone. After each step, experts that got more than the mean have their bias lowered by a fixed rate,
and those that got less have it raised. Models in transformers carry such a bias (`e_score_correction_bias`,
`expert_bias`), and nothing in transformers moves it.

    balancer = RouterBiasBalancer(model, update_rate=1e-3)
    for batch in loader:
        ...                 # forward, backward
        optimizer.step()
        balancer.step()     # all ranks must call it
    balancer.remove()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from flex_trainer.compat import is_in_backward
from flex_trainer.errors import UserError
from flex_trainer.models.discovery import find_experts
from flex_trainer.models.routing import Routing, top_k_index_of
from flex_trainer.ranks import num_ranks

BIAS_NAMES = frozenset({"e_score_correction_bias", "expert_bias"})
"""What models call the bias on the choice of experts."""


@dataclass(frozen=True)
class BiasedRouter:
    """The experts of a layer, and the bias with which they are chosen."""

    name: str
    """Path of the bias in the model."""
    owner: nn.Module
    """The module that has it."""
    experts: nn.Module

    @property
    def bias(self) -> torch.Tensor:
        return getattr(self.owner, self.name.rpartition(".")[2])


def find_biased_routers(model: nn.Module) -> list[BiasedRouter]:
    """All experts of `model` that are chosen with a bias: it stands in the router, in a part of it, or beside it."""
    names = {module: name for name, module in model.named_modules()}
    modules = {name: module for module, name in names.items()}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    biases = [name for name, _ in tensors if name.rpartition(".")[2] in BIAS_NAMES]
    found = []
    for experts in find_experts(model):
        beside = _parent(names[experts])
        near = [name for name in biases if beside in _ancestors(name)]
        if near:
            name = min(near, key=len)
            found.append(BiasedRouter(name, modules[_parent(name)], experts))
    return found


class RouterBiasBalancer:
    """Counts how many tokens each expert gets, and moves the biases.

    Counted is what routers choose in training forwards: not without gradients, not in evaluation, and not again where
    backward recomputes. Counts stay on the device; `step` adds them up over ranks in one all-reduce. Biases are made
    float32 (a rate of 0.001 is lost in half precision) and stay what they are otherwise: tensors of the model, saved
    and loaded with it.

    Args:
        model: hooks are put on its experts until `remove`.
        update_rate: what a bias is raised or lowered by in each step; 0.001 in DeepSeek-V3.

    Raises:
        ValueError: no router of the model has such a bias, or a rate that is not above 0.
    """

    def __init__(self, model: nn.Module, update_rate: float = 1e-3) -> None:
        if not update_rate > 0:
            raise UserError(f"update_rate={update_rate} must be above 0; DeepSeek-V3 used 0.001")
        self.update_rate = update_rate
        self.routers = find_biased_routers(model)
        if not self.routers:
            raise UserError(
                f"no router of {type(model).__name__} chooses experts with a bias ({', '.join(sorted(BIAS_NAMES))}), "
                "so there is none to balance by; leave router_bias_update_rate out, or use the model's auxiliary loss"
            )
        for router in self.routers:
            _make_float32(router)
        self._counts: list[torch.Tensor | None] = [None] * len(self.routers)
        self._handles = [
            router.experts.register_forward_pre_hook(_Hook(self, number), with_kwargs=True)
            for number, router in enumerate(self.routers)
        ]

    def remember(self) -> CountsBefore:
        """The counts as they are now, to be put back where a step is run again."""
        return CountsBefore(self)

    @torch.no_grad()
    def step(self) -> None:
        """Move all biases by what was counted since the last step, on all ranks together. All ranks must call this."""
        counts = [
            torch.zeros(router.bias.numel(), dtype=torch.int64, device=router.bias.device) if count is None else count
            for router, count in zip(self.routers, self._counts, strict=True)
        ]
        self._counts = [None] * len(self.routers)
        if num_ranks() > 1:
            together = torch.cat(counts)
            dist.all_reduce(together)
            counts = list(together.split([count.numel() for count in counts]))
        for router, count in zip(self.routers, counts, strict=True):
            load = count.double()  # exact: signs are the same on all ranks
            _add(router.bias, self.update_rate * torch.sign(load.mean() - load).float())

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _count(self, number: int, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not (experts.training and torch.is_grad_enabled()) or is_in_backward():
            return
        chosen = top_k_index_of(args, kwargs)
        if chosen is None:
            return
        count = Routing.local(chosen, self.routers[number].bias.numel()).count()
        assert count is not None
        earlier = self._counts[number]
        self._counts[number] = count if earlier is None else earlier + count


class _Hook:
    """Counts for a balancer. In a copy of the model it counts nothing: the copy's tokens train nobody, and a balancer
    holds handles of hook tables, by which copying would reach FSDP's state and process groups."""

    def __init__(self, balancer: RouterBiasBalancer | None, number: int) -> None:
        self._balancer = balancer
        self._number = number

    def __call__(self, experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._balancer is not None:
            self._balancer._count(self._number, experts, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (None, self._number)


class CountsBefore:
    """What a balancer had counted when this was made; `restore()` may be called more than once."""

    def __init__(self, balancer: RouterBiasBalancer) -> None:
        self._balancer = balancer
        self._counts = tuple(balancer._counts)  # tensors are replaced, never written to

    def restore(self) -> None:
        self._balancer._counts = list(self._counts)


def _ancestors(name: str) -> list[str]:
    """The module that has the tensor, the one around it, and the one around that."""
    return [_parent(name), _parent(_parent(name)), _parent(_parent(_parent(name)))]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _make_float32(router: BiasedRouter) -> None:
    bias = router.bias
    if bias.dtype == torch.float32:
        return
    if isinstance(bias, DTensor):
        raise UserError(
            f"{router.name} is sharded in {bias.dtype}, in which steps of a router's bias are lost; load the model in "
            "float32, or leave router_bias_update_rate out"
        )
    bias.data = bias.data.float()


def _add(bias: torch.Tensor, change: torch.Tensor) -> None:
    """Add a change (E,) that all ranks know to a bias of E elements, sharded or not."""
    change = change.view(bias.shape)
    if isinstance(bias, DTensor):
        # Every rank has all of it: nothing is sent.
        mine = distribute_tensor(change, bias.device_mesh, bias.placements, src_data_rank=None)
        bias.to_local().add_(mine.to_local())
    else:
        bias.add_(change)
