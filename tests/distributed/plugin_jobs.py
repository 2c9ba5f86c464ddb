"""A plain Accelerate loop over a spread model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from flex_trainer import FlexConfig, FlexPlugin
from flex_trainer.testing.forced import ForcedRuntime
from tests.distributed.models import all_ids, gradients_of, my_part, spread_model


def clipped(path: str, max_norm: float, norm_type: float, **parallel: Any) -> dict[str, Any]:
    """The norm that clipping reports on this rank, and the clipped gradients (rank 0)."""
    AcceleratorState._reset_state()
    PartialState._reset_state()
    accelerator = Accelerator(cpu=True)
    model = spread_model(Path(path), **parallel)
    plugin = FlexPlugin(FlexConfig(memory_limit="20GiB", trace=False))
    plugin.attach(accelerator, model)
    ids = my_part(all_ids(model))
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    norm: Any = accelerator.clip_grad_norm_(model.parameters(), max_norm, norm_type)  # type: ignore[arg-type]
    plugin.detach()
    gradients = gradients_of(model)
    return {"norm": float(norm), "gradients": gradients if dist.get_rank() == 0 else None}


def attached_after_evaluation(path: str, **parallel: Any) -> bool:
    """After a forward without a backward some weights are whole, as if they belonged to this rank alone."""
    AcceleratorState._reset_state()
    PartialState._reset_state()
    model = spread_model(Path(path), **parallel)
    ids = my_part(all_ids(model))
    with torch.no_grad():
        model(input_ids=ids, labels=ids)
    plugin = FlexPlugin(FlexConfig(memory_limit="20GiB", trace=False))
    plugin.attach(Accelerator(cpu=True), model)
    with plugin.runtime.backward():
        model(input_ids=ids, labels=ids).loss.backward()
    plugin.detach()
    return all(isinstance(parameter.grad, DTensor) for parameter in model.parameters() if parameter.grad is not None)


def accumulated(path: str, **parallel: Any) -> dict[str, Any]:
    """Gradients of two micro-batches with and without reduction in between, and what the budget knew of them."""
    model: Any = spread_model(Path(path), **parallel)
    answers: dict[str, Any] = {}
    for is_deferred in (False, True):
        plugin = FlexPlugin(FlexConfig(memory_limit="20GiB", trace=False))
        plugin.runtime.attach(model)
        pending = []
        for number in range(2):
            model.set_requires_gradient_sync(not is_deferred or number == 1)
            ids = my_part(all_ids(model, seed=number))
            with plugin.runtime.backward():
                loss = model(input_ids=ids, labels=ids).loss
                pending.append(sum(plugin.runtime.in_flight[0].gradients.pending.values()))
                loss.backward()
        plugin.runtime.detach()
        answers["deferred" if is_deferred else "reduced"] = {
            "pending_bytes": pending,
            "gradients": gradients_of(model),
        }
        model.zero_grad()
    whole_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    local_bytes = sum(p.to_local().numel() * p.element_size() for p in model.parameters())  # type: ignore[attr-defined]
    return {**answers, "whole_bytes": whole_bytes, "local_bytes": local_bytes}


def fsdp_plugin_step(path: str, strategies: tuple[str, ...]) -> dict[str, Any]:
    """One step of a model that accelerate's FSDP2 plugin has sharded."""
    import accelerate
    from transformers import AutoModelForCausalLM

    from tests.distributed.equality_jobs import Forced

    AcceleratorState._reset_state()
    PartialState._reset_state()
    answers: dict[str, Any] = {}
    model = AutoModelForCausalLM.from_pretrained(path).train()
    fsdp = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(model.model.layers[0]).__name__],
    )
    accelerator = Accelerator(cpu=True)
    # accelerate chooses FSDP for accelerators only; what it does then works on CPU ranks just as well.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = fsdp
    optimizer = torch.optim.AdamW(model.parameters())
    prepared, optimizer = accelerator.prepare(model, optimizer)
    for strategy in strategies:
        plugin = FlexPlugin()
        plugin.runtime = ForcedRuntime(Forced(strategy))
        plugin.attach(accelerator, prepared)
        ids = my_part(all_ids(prepared))
        loss = prepared(input_ids=ids, labels=ids).loss
        freed = plugin.runtime.in_flight[0].ledger.freed_bytes
        accelerator.backward(loss)
        plugin.detach()
        gradients = gradients_of(prepared)
        prepared.zero_grad()
        answers[strategy] = {"freed": dict(freed), "gradients": gradients if dist.get_rank() == 0 else None}
    return answers


def whole_when_asked(path: str, **parallel: Any) -> list[tuple[bool, bool]]:
    """Whether a backward is put off, before and after clipping, and before and after an optimizer's step, in windows
    whose last micro-batch never comes."""
    AcceleratorState._reset_state()
    PartialState._reset_state()
    accelerator = Accelerator(cpu=True)
    model: Any = spread_model(Path(path), **parallel)
    optimizer: Any = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    plugin = FlexPlugin(FlexConfig(memory_limit="20GiB", trace=False, fuse=True))
    plugin.attach(accelerator, model)
    assert plugin.fused is not None
    found = []
    for ask in (lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0), optimizer.optimizer.step):
        accelerator.gradient_state._set_sync_gradients(False)
        ids = my_part(all_ids(model))
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        is_put_off = plugin.fused.has_pending
        ask()
        found.append((is_put_off, plugin.fused.has_pending))
    plugin.detach()
    return found
