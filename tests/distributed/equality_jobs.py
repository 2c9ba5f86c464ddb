"""One step of a spread model under chosen strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from flex_trainer.activations.choices import Choices
from flex_trainer.planner.plan import Uniform
from flex_trainer.strategy import EP_BLOCK, Site, Strategy
from flex_trainer.testing.forced import ForcedRuntime, MixedChoices
from tests.distributed.models import all_ids, gradients_of, mean_over_ranks, my_part, skew, spread_model

STRATEGIES = ("keep", "recompute", "offload", "quantize", "mixed", "differs_by_rank", "recomputed_dispatch")


class Forced:
    """The same strategy everywhere it is allowed; "mixed": one by the site's name; "differs_by_rank": also by rank.
    Dispatches are recomputed under "recomputed_dispatch" alone: then everything is recomputed.

    Args:
        name: of STRATEGIES.
    """

    def __init__(self, name: str) -> None:
        self._recomputes_dispatch = name == "recomputed_dispatch"
        self._choices: Choices
        if name in ("mixed", "differs_by_rank"):
            self._choices = MixedChoices(dist.get_rank() if name == "differs_by_rank" else 0)
        else:
            self._choices = Uniform(Strategy("recompute" if self._recomputes_dispatch else name))

    def strategy(self, site: Site) -> Strategy:
        if site.kind == EP_BLOCK:
            return Strategy.RECOMPUTE if self._recomputes_dispatch else Strategy.KEEP
        return self._choices.strategy(site)


def steps(
    path: str, strategies: tuple[str | None, ...], is_skewed: bool = False, **parallel: Any
) -> list[dict[str, Any]]:
    """For each strategy: loss, gradients (on rank 0) and what the ledger says of one step.

    Args:
        strategies: of STRATEGIES; None: no runtime at all.
        is_skewed: all tokens go to the first experts.
        parallel: as `spread_model`.
    """
    model = spread_model(Path(path), **parallel)
    if is_skewed:
        skew(model)
    return [_step(model, strategy) for strategy in strategies]


def tensor_parallel_step(path: str) -> dict[str, Any]:
    """Loss and gradients of a model under tensor and expert parallelism over the same ranks, without a runtime."""
    size = dist.get_world_size()
    config = DistributedConfig(tp_size=size, ep_size=size, ep_implementation="flex")
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config).train()
    ids = odd_ids(model)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": float(loss.detach()), "gradients": gradients_of(model)}


def odd_ids(model: Any) -> torch.Tensor:
    """One sequence of an odd length: two ranks have unequal shares of it."""
    return all_ids(model)[:1, 1:]


def _step(model: Any, strategy: str | None) -> dict[str, Any]:
    model.zero_grad()
    ids = my_part(all_ids(model))
    answer: dict[str, Any] = {}
    if strategy is None:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    else:
        runtime = ForcedRuntime(Forced(strategy))
        runtime.attach(model)
        loss = model(input_ids=ids, labels=ids).loss
        ledger = runtime.in_flight[0].ledger
        with runtime.backward():
            loss.backward()
        answer.update(freed=dict(ledger.freed_bytes), recomputes=ledger.num_recomputes, held=ledger.held_bytes)
        runtime.detach()
    gradients = gradients_of(model)
    answer["loss"] = mean_over_ranks(loss)
    answer["gradients"] = gradients if dist.get_rank() == 0 else None
    return answer
