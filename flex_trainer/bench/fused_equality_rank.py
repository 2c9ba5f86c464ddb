"""Optimizer steps of several micro-batches on one rank, with a backward beside each forward and without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from torch import nn

from flex_trainer.activations.choices import Choices
from flex_trainer.bench.ep_model import FLEX, MeshSizes, load_model
from flex_trainer.bench.fused_loop import accumulate
from flex_trainer.config import FlexConfig
from flex_trainer.models.discovery import find_experts
from flex_trainer.planner.fusion import Side
from flex_trainer.planner.plan import Uniform
from flex_trainer.plugin import FlexPlugin
from flex_trainer.steps.order_choice import OrderChoice
from flex_trainer.strategy import EP_BLOCK, Site, Strategy
from flex_trainer.testing.forced import ForcedRuntime, MixedChoices, whole
from flex_trainer.testing.tiny import tiny_batch

CHOICES = ("keep", "recompute", "offload", "mixed", "recomputed_dispatch")
"""mixed: one of the three, by the operator's name. Dispatches are recomputed in the last one alone, with all else."""
_AMPLE = "20GiB"
_ROWS, _LENGTH = 4, 96
_LENGTH_STEP = 17


class Chosen:
    """The choices of a name of `CHOICES`."""

    def __init__(self, name: str) -> None:
        self._recomputes_dispatch = name == "recomputed_dispatch"
        self._choices: Choices = (
            MixedChoices() if name == "mixed" else Uniform(Strategy("recompute" if self._recomputes_dispatch else name))
        )

    def strategy(self, site: Site) -> Strategy:
        if site.kind == EP_BLOCK:
            return Strategy.RECOMPUTE if self._recomputes_dispatch else Strategy.KEEP
        return self._choices.strategy(site)


def steps(
    *,
    path: str,
    mesh: Sequence[int],
    fuse: Sequence[bool],
    num_steps: int,
    accumulation: int,
    choices: str | None = None,
    limit: str = _AMPLE,
    is_skewed: bool = False,
    has_autocast: bool = False,
    is_uneven: bool = False,
    order_seed: int | None = None,
    options: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """For each of `fuse`: losses, the gradients of the last step and the weights after it (rank 0), how many forwards
    had a backward beside them, how many records there are, and bytes that were given back.

    Args:
        mesh: the fields of a `MeshSizes`.
        choices: of `CHOICES`; None: planned under `limit`.
        is_skewed: all tokens go to the first experts, those of rank 0.
        is_uneven: the ranks' sequences differ in length, and those of a rank from micro-batch to micro-batch.
        order_seed: sides take turns at random, alike on all ranks; None: as it is decided.
        options: settings of the model's config.
    """
    answers = []
    rank, device = dist.get_rank(), "cuda" if torch.cuda.is_available() else "cpu"
    for is_fused in fuse:
        AcceleratorState._reset_state()
        PartialState._reset_state()
        accelerator = Accelerator(cpu=device == "cpu", gradient_accumulation_steps=accumulation)
        model: Any = load_model(path, MeshSizes(*mesh), FLEX, **(options or {}))
        if is_skewed:
            _skew(model)
        torch.manual_seed(100 + rank)  # dropout
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        plugin = FlexPlugin(FlexConfig(memory_limit=limit, fuse=is_fused))
        if choices is not None:
            plugin.runtime = ForcedRuntime(Chosen(choices), fuse=is_fused)
        plugin.attach(accelerator, model)
        if plugin.fused is not None and order_seed is not None:
            _take_random_orders(plugin.fused.choice, order_seed)
        losses: list[float] = []
        gradients: dict[str, torch.Tensor] = {}
        for step in range(num_steps):
            lengths = (
                _LENGTH - (_LENGTH_STEP * ((step + number + 2 * rank) % 5) if is_uneven else 0)
                for number in range(accumulation)
            )
            batches = [
                tiny_batch(model, _ROWS, length, seed=1000 * step + 10 * number + rank)
                for number, length in enumerate(lengths)
            ]
            context = torch.autocast(device, torch.bfloat16) if has_autocast else None
            losses += accumulate(accelerator, model, batches, context)
            gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        num_pairs = 0 if plugin.fused is None else plugin.fused.num_pairs
        records = list(plugin.runtime.records)
        plugin.detach()
        weights = {name: whole(parameter) for name, parameter in model.named_parameters()}
        answers.append(
            {
                "losses": losses,
                "gradients": gradients if rank == 0 else None,
                "weights": weights if rank == 0 else None,
                "num_pairs": num_pairs,
                "num_records": len(records),
                "freed": sum(sum(record.freed_bytes.values()) for record in records),
            }
        )
    return answers


def differences(**job: Any) -> dict[str, Any]:
    """What differs between steps one after the other and fused ones: names of losses, gradients and weights.

    Args:
        job: as for `steps`, without `fuse`.
    """
    plain, fused = steps(fuse=(False, True), **job)
    names = [] if plain["losses"] == fused["losses"] else ["losses"]
    if dist.get_rank() == 0:
        for what in ("gradients", "weights"):
            pairs = [(name, tensor, fused[what].get(name)) for name, tensor in plain[what].items()]
            names += [f"{what} of {name}" for name, one, other in pairs if other is None or not torch.equal(one, other)]
    return {"different": names, "num_pairs": fused["num_pairs"], "freed": fused["freed"]}


def _skew(model: nn.Module) -> None:
    for module in find_experts(model):
        module.register_forward_pre_hook(_first_experts)


def _first_experts(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden_states, index, weights = args
    return hidden_states, torch.arange(index.size(1), device=index.device).expand_as(index), weights


def _take_random_orders(choice: OrderChoice, seed: int) -> None:
    """Another order for each pair."""
    stream, choose = random.Random(seed), choice.choose

    def choose_any() -> None:
        choose()
        choice.order = tuple(stream.choices((Side.FORWARD, Side.BACKWARD), k=500))

    choice.choose = choose_any
    choice.order = tuple(stream.choices((Side.FORWARD, Side.BACKWARD), k=500))
