"""The model, the batch and the steps that check.py compares."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from flex_trainer import FlexConfig, FlexPlugin
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.offload import OffloadStore
from flex_trainer.activations.scope import Scope
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.fake_meter import with_fake_meter
from flex_trainer.testing.steps import ByFunction


class Skipped(Exception):
    """A check that does not apply here."""


@dataclass
class Run:
    """The device, the model and what was found so far."""

    device: torch.device
    is_quick: bool
    model: PreTrainedModel
    batch: dict[str, torch.Tensor]
    results: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def short(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """The start of the batch's first row: what is held whole, in full precision or on the host, has to be small."""
        return {name: value[:1, :num_tokens] for name, value in self.batch.items()}

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def check(self, name: str, function: Callable[[Run], None]) -> None:
        started = time.perf_counter()
        try:
            function(self)
            result = "PASS"
        except Skipped as reason:
            result = f"SKIP: {reason}"
        except Exception as error:  # the other checks still have something to say
            result = f"FAIL: {type(error).__name__}: {error}"
            traceback.print_exc()
        self.results[name] = result
        print(f"{result[:4]} {name} ({time.perf_counter() - started:.1f} s){result[4:]}", file=sys.stderr, flush=True)
        self.clean()

    def clean(self) -> None:
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.on_cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)


def make_run(device: torch.device, is_quick: bool) -> Run:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "moe_intermediate_size": 32, "num_attention_heads": 2}
    batch_size, length, vocabulary, num_experts, num_top_k = 2, 64, 128, 4, 2
    if not is_quick:
        sizes = {"hidden_size": 1024, "num_hidden_layers": 10, "moe_intermediate_size": 512, "num_attention_heads": 16}
        small = device.type == "cpu" or torch.cuda.get_device_properties(device).total_memory < 20 * 2**30
        batch_size, length, vocabulary, num_experts, num_top_k = 2 if small else 4, 2048, 1024, 16, 4
    config = AutoConfig.for_model(
        "qwen3_moe",
        **sizes,
        vocab_size=vocabulary,
        intermediate_size=2 * sizes["hidden_size"],
        num_key_value_heads=sizes["num_attention_heads"],
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        num_experts=num_experts,
        num_experts_per_tok=num_top_k,
        max_position_embeddings=length,
        use_cache=False,
        output_router_logits=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device).train()
    ids = torch.randint(1, vocabulary, (batch_size, length), device=device)
    return Run(device, is_quick, model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})


# Steps


@dataclass
class Step:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    ledger: Ledger = field(default_factory=Ledger)

    def difference(self, other: Step) -> float:
        """Largest difference of loss and gradients, relative to the other's largest gradient."""
        assert self.gradients.keys() == other.gradients.keys()
        scale = max(float(gradient.abs().max()) for gradient in other.gradients.values())
        worst = max(float((self.gradients[n] - other.gradients[n]).abs().max()) for n in other.gradients)
        return max(worst / scale, float((self.loss - other.loss).abs()))

    def norm(self) -> float:
        return float(torch.stack([gradient.float().norm() for gradient in self.gradients.values()]).norm())


def autocast(run: Run, dtype: torch.dtype | None) -> Any:
    return nullcontext() if dtype is None else torch.autocast(run.device.type, dtype)


def engine_step(
    run: Run,
    choose: Callable[[Site], Strategy] | None,
    dtype: torch.dtype | None,
    store: OffloadStore | None = None,
    num_tokens: int = 512,
) -> Step:
    """One step with every storage, however small, under its strategy; plain when `choose` is None."""
    batch = run.short(num_tokens)
    model, ledger = run.model, Ledger()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    if choose is None:
        with autocast(run, dtype):
            loss = model(**batch).loss
    else:
        parameters = [*model.parameters(), *model.buffers()]
        make_store = (lambda: store) if store is not None else None
        scope = Scope(ByFunction(choose), ledger, parameters=parameters, store=make_store, min_mitigated_bytes=1)
        with scope.open(), autocast(run, dtype):
            loss = model(**batch).loss
        if store is not None:
            store.poll()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    if store is not None:
        store.forget_dead()
    return Step(loss.detach(), gradients, ledger)


@contextmanager
def managed(run: Run, **settings: Any) -> Iterator[tuple[Accelerator, FlexPlugin | None]]:
    """A training loop's accelerator, with FlexTrainer's plugin where there are settings."""
    accelerator = Accelerator(cpu=not run.on_cuda)
    plugin = FlexPlugin(FlexConfig(**settings)) if settings else None
    if plugin is not None:
        if not run.on_cuda:
            with_fake_meter(plugin.runtime)
        plugin.attach(accelerator, run.model)
    try:
        yield accelerator, plugin
    finally:
        if plugin is not None:
            plugin.detach()


def train(run: Run, accelerator: Accelerator, num_steps: int, dtype: torch.dtype | None) -> tuple[list[float], list]:
    """Losses and seconds of some steps; gradients only, so that every step of every side is the same."""
    losses, seconds = [], []
    for _ in range(num_steps):
        run.synchronize()
        started = time.perf_counter()
        torch.manual_seed(0)
        with autocast(run, dtype):
            loss = run.model(**run.batch).loss
        accelerator.backward(loss)
        run.synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss.detach()))
        del loss
        run.model.zero_grad(set_to_none=True)
    return losses, seconds


def peak_of(run: Run, checkpoints: bool = False) -> int:
    """Peak of a plain step; with gradient checkpointing on request."""
    with managed(run) as (accelerator, _), checkpointing(run, checkpoints):
        train(run, accelerator, 1, torch.bfloat16)
        run.clean()
        torch.cuda.reset_peak_memory_stats(run.device)  # this process is ours
        train(run, accelerator, 1, torch.bfloat16)
    return torch.cuda.max_memory_allocated(run.device)


def predicted_peak_of(run: Run) -> int:
    """What keeping everything is predicted to need. The fake meter sees less: no gradients, no workspace."""
    with managed(run, memory_limit=0.9) as (accelerator, plugin):
        assert plugin is not None
        train(run, accelerator, 2, torch.bfloat16)
        return plugin.runtime.records[-1].predicted_peak_bytes


@contextmanager
def checkpointing(run: Run, is_on: bool) -> Iterator[None]:
    if is_on:
        run.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield
    finally:
        if is_on:
            run.model.activation_checkpointing_disable()
