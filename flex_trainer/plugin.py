"""FlexPlugin: the runtime in a plain Accelerate loop.

    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    flex = FlexPlugin(FlexConfig(memory_limit="12GiB"))
    flex.attach(accelerator)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step(); optimizer.zero_grad()
    flex.detach()

With forward and backward in a function, a step whose memory runs out is rolled back and retried, instead of ending the
run (see steps/transaction.py):

    def forward_and_backward(batch):
        loss = model(**batch).loss
        accelerator.backward(loss)
        return loss.detach()

    for batch in loader:
        with accelerator.accumulate(model):
            loss = flex.run(forward_and_backward, batch)
            optimizer.step(); optimizer.zero_grad()

Accelerate has no registry for plugins of others (a foreign handler in `kwargs_handlers` raises a KeyError), so this one
is attached to the accelerator after `prepare`.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.tensor import DTensor

from flex_trainer.clipping import clip_grad_norm_
from flex_trainer.compat import prepared_models, prepared_optimizers
from flex_trainer.config import FlexConfig
from flex_trainer.errors import UserError
from flex_trainer.models.sharding import reshard
from flex_trainer.ranks import num_ranks
from flex_trainer.runtime import FlexRuntime
from flex_trainer.steps.fused import FusedSteps, obstacle_to_fusing
from flex_trainer.steps.transaction import Restorable, Transaction
from flex_trainer.undo import replace_attribute

T = TypeVar("T")


class FlexPlugin:
    """Attaches a FlexRuntime to an Accelerator and a model.

    `run(function, *args)` makes forward and backward repeatable: where an allocation fails, the optimizer step is
    rolled back and its micro-batches are retried in less memory.

    Args:
        config: the settings; read from the device when None.
        remember: called before every call of `run`; each returns an object whose `restore()` puts back what the
            function changes besides gradients, buffers and random streams.
    """

    def __init__(self, config: FlexConfig | None = None, remember: tuple[Callable[[], Restorable], ...] = ()) -> None:
        self.runtime = FlexRuntime(config)
        self._remember = remember
        self._transaction: Transaction | None = None
        self.fused: FusedSteps | None = None
        """Runs backwards beside forwards, while a model is attached for which that may pay."""
        self._undo: list[Callable[[], None]] = []

    @property
    def is_attached(self) -> bool:
        return self.runtime.is_attached

    def attach(self, accelerator: Accelerator, model: nn.Module | None = None) -> FlexRuntime:
        """Manage the activations of `model`, or of the one model that `accelerator` has prepared.

        Raises:
            ValueError: no model or several were prepared and none is given; DeepSpeed or Megatron-LM is on; and what
                `FlexRuntime.attach` raises.
        """
        _refuse_other_engines(accelerator)
        if model is None:
            prepared = prepared_models(accelerator)
            if len(prepared) != 1:
                raise UserError(
                    f"the accelerator has prepared {len(prepared)} models; call attach after accelerator.prepare, or "
                    "name the model to manage: attach(accelerator, model)"
                )
            model = prepared[0]
        unwrapped = accelerator.unwrap_model(model)
        reshard(unwrapped)
        is_sharded_at_load_time = getattr(unwrapped, "is_distributed_loading_by_transformers", False)
        if is_sharded_at_load_time:
            _refuse_lone_parameters(unwrapped)
        self.runtime.attach(unwrapped)
        self._undo.append(self.runtime.detach)
        self._wrap_backward(accelerator)
        if is_sharded_at_load_time:
            self._wrap_clipping(accelerator)
        self._start_fusing(accelerator)
        self._transaction = Transaction(
            self.runtime,
            (lambda: _SyncFlag(accelerator), *self._remember),
            optimizers=lambda: prepared_optimizers(accelerator),
        )
        return self.runtime

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call `function(*args, **kwargs)` and return what it returns. The function runs forward and backward of one or
        more micro-batches; where memory runs out in it, all that this optimizer step has run so far is retried, in less
        memory, with the same result as if nothing had failed.

        The function must do the same each time: take its data as arguments, leave the optimizer's step and counting to
        the caller, and return nothing that holds the graph (`loss.detach()`, not `loss`). Gradients must be None when
        the optimizer step begins (`zero_grad()` does that), and there must be one process only; otherwise the error of
        the allocation is raised, with a note that says why.

        Raises:
            MemoryLimitError: memory ran out even under the minimum-memory plan: which operator, how many bytes, which
                limit.
        """
        if self._transaction is None:
            return function(*args, **kwargs)
        return self._transaction.run_micro_batch(function, *args, **kwargs)

    def detach(self) -> None:
        """Give model and accelerator back as they were.

        Several plugins on one accelerator, each with a model of its own, may be detached in any order.

        Raises:
            ValueError: the seed profile cannot be written; all is given back all the same.
        """
        self._transaction = None  # holds the step's inputs
        while self._undo:
            self._undo.pop()()

    def _wrap_backward(self, accelerator: Accelerator) -> None:
        original = accelerator.backward

        @functools.wraps(original)
        def backward(loss: Any, **kwargs: Any) -> None:
            if not self.is_attached:  # called by another plugin that was attached later and is there still
                original(loss, **kwargs)
                return

            def run() -> None:
                with self.runtime.backward():
                    original(loss, **kwargs)

            if self.fused is not None:
                is_plain = isinstance(loss, torch.Tensor) and not kwargs
                self.fused.backward(loss, run, may_wait=is_plain and not accelerator.sync_gradients)
            else:
                run()
            if accelerator.sync_gradients:
                self.runtime.step += 1

        self._undo.append(replace_attribute(accelerator, "backward", backward))

    def _start_fusing(self, accelerator: Accelerator) -> None:
        fuse = self.runtime.config.fuse
        why_not = obstacle_to_fusing(self.runtime) if fuse else None
        if fuse is True and why_not is not None:
            warnings.warn(f"fuse=True has no effect: {why_not}.", stacklevel=3)
        if fuse and why_not is None:
            self.fused = fused = FusedSteps(self.runtime)
            self._undo.append(self._stop_fusing)
            # Gradients must be whole when somebody looks at all of them, in windows of whatever form.
            for optimizer in prepared_optimizers(accelerator):
                handle = optimizer.optimizer.register_step_pre_hook(lambda *_: fused.settle())
                self._undo.append(handle.remove)
            original = accelerator.clip_grad_norm_

            @functools.wraps(original)
            def clip(*args: Any, **kwargs: Any) -> Any:
                fused.settle()
                return original(*args, **kwargs)

            self._undo.append(replace_attribute(accelerator, "clip_grad_norm_", clip))

    def _stop_fusing(self) -> None:
        fused, self.fused = self.fused, None
        if fused is not None:
            has_failed = sys.exc_info()[0] is not None
            if has_failed and fused.has_pending:
                warnings.warn(
                    "detached while an error is handled: the backward of the latest micro-batch, which was put off, is "
                    "dropped, and its gradients with it.",
                    stacklevel=3,
                )
            fused.stop(has_failed=has_failed)

    def _wrap_clipping(self, accelerator: Accelerator) -> None:
        """accelerate clips by torch's function, which raises for experts and other weights on meshes of their own."""

        def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
            accelerator.unscale_gradients()
            return clip_grad_norm_(parameters, max_norm, norm_type)

        self._undo.append(replace_attribute(accelerator, "clip_grad_norm_", clip))


def _refuse_other_engines(accelerator: Accelerator) -> None:
    """Refuse engines that own forward, backward and the weights themselves.

    Raises:
        ValueError: DeepSpeed or Megatron-LM.
    """
    names = {DistributedType.DEEPSPEED: "DeepSpeed", DistributedType.MEGATRON_LM: "Megatron-LM"}
    name = names.get(accelerator.distributed_type)
    if name is not None:
        raise UserError(
            f"the accelerator runs {name} (distributed_type={accelerator.distributed_type.value}), whose weights and "
            "backward FlexTrainer cannot manage. Shard weights by FSDP2 and spread experts over ranks instead: load "
            'the model with distributed_config=DistributedConfig(fsdp_size=..., ep_size=..., ep_implementation="flex") '
            "and leave the DeepSpeed or Megatron-LM settings out (docs/parallelism.md)."
        )


def _refuse_lone_parameters(model: nn.Module) -> None:
    """Refuse parameters that were added after the model was sharded, which are not kept equal on the ranks.

    Raises:
        ValueError: the first of them.
    """
    if num_ranks() == 1:
        return
    for name, parameter in model.named_parameters():
        is_synchronized = isinstance(parameter, DTensor) or bool(
            getattr(parameter, "_post_accumulate_grad_hooks", None)
        )
        if parameter.requires_grad and not is_synchronized:
            raise UserError(
                f"parameter {name!r} was added after the model was sharded (an adapter, say): every rank would train a "
                "copy of its own. Use FlexTrainer, which averages its gradient over the ranks as Trainer does, or do "
                "that in a hook (register_post_accumulate_grad_hook) before attach."
            )


class _SyncFlag:
    """Whether gradients are synchronized in this micro-batch, as the loop has told the accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._state = accelerator.gradient_state
        self._is_set = accelerator.sync_gradients

    def restore(self) -> None:
        self._state._set_sync_gradients(self._is_set)
