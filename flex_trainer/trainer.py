"""FlexTrainer: transformers' Trainer inside a memory limit. Read this first, then runtime.py.

    trainer = FlexTrainer(model=model, args=args, train_dataset=dataset, flex=FlexConfig(memory_limit="1.4GiB"))
    trainer.train()
    trainer.flex.records                 # one record per micro-batch
    trainer.flex.report("report.html")
    trainer.train(resume_from_checkpoint=True)

The Trainer is left alone: its loop, its loss, its accumulation. The runtime is attached to the model when the first
training step begins (the model is in its final form then) and detached when training ends. Where an allocation fails
all the same, the optimizer step is rolled back and its micro-batches are retried in less memory (steps/transaction.py).
Checkpoints are in checkpoint/: complete or not there at all, and of models that are sharded over ranks too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import Trainer, TrainingArguments

from flex_trainer.callbacks import FlexMemoryCallback, LossFreeBalancing, close_bars, use_flex_progress
from flex_trainer.checkpoint import CheckpointMixin
from flex_trainer.checkpoint.manifest import PLANNER_FILE
from flex_trainer.config import FlexConfig, check_is_config
from flex_trainer.errors import UserError
from flex_trainer.memory.optimizer_step import note_optimizer_step
from flex_trainer.plugin import FlexPlugin
from flex_trainer.runtime import FlexRuntime
from flex_trainer.snapshot import Bookkeeping


class FlexTrainerMixin(CheckpointMixin):
    """Adds FlexTrainer's behaviour to a Trainer class: `class MyTrainer(FlexTrainerMixin, SFTTrainer): ...`.

    Args:
        flex: the settings; memory limit read from the device when None. All other arguments go to the Trainer.
    """

    def __init__(self, *args: Any, flex: FlexConfig | None = None, **kwargs: Any) -> None:
        check_is_config("flex", flex)
        super().__init__(*args, **kwargs)
        _refuse_arguments(self.args)
        # Trainers count things in their loss (TRL's metrics, for one): a micro-batch that runs twice counts once.
        self._plugin = FlexPlugin(flex, remember=(lambda: Bookkeeping(self), lambda: _Callbacks(self)))
        self._memory_callback = FlexMemoryCallback(self.flex)
        self.add_callback(self._memory_callback)
        if self.flex.config.router_bias_update_rate:
            balancing = LossFreeBalancing(self.flex.config.router_bias_update_rate)
            self.add_callback(balancing)
            balancing.on_init_end(self.args, self.state, self.control, model=self.model)
        use_flex_progress(self, self.flex)

    @property
    def flex(self) -> FlexRuntime:
        """The runtime: records, limit, report."""
        return self._plugin.runtime

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            result = super().train(*args, **kwargs)
        except BaseException as error:
            note_optimizer_step(error, self.flex.config.memory_limit, self.flex.limit_bytes)
            close_bars(self)  # pyright: ignore[reportArgumentType]
            self._detach_after(error)
            raise
        self._plugin.detach()
        return result

    def _detach_after(self, error: BaseException) -> None:
        try:
            self._plugin.detach()
        except Exception as also:  # must not hide why training ended
            error.add_note(f"Besides, detaching failed: {also!r}")

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._plugin.is_attached:
            self._plugin.attach(self.accelerator, model)
        self.flex.step = self.state.global_step
        try:
            return self._plugin.run(super().training_step, model, *args, **kwargs)
        except RuntimeError as error:
            if self.args.auto_find_batch_size:  # accelerate's search may begin again, and prepares the model anew
                self._detach_after(error)
            raise

    def _save_own_state(self, directory: Path) -> None:
        self.flex.save_planner(directory / PLANNER_FILE.format(rank=self.args.process_index))

    def _load_own_state(self, directory: Path) -> None:
        own, first = (directory / PLANNER_FILE.format(rank=rank) for rank in (self.args.process_index, 0))
        if own.exists() or first.exists():  # the first rank's, where there were fewer
            self.flex.resume_planner(own if own.exists() else first)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        # Into the Trainer's own call, so that every tracker has the values in the row of the loss.
        gather = gather_object if self.args.world_size > 1 else None
        super().log({**logs, **self._memory_callback.log_values(logs, gather)}, *args, **kwargs)


class FlexTrainer(FlexTrainerMixin, Trainer):
    """A transformers Trainer whose activations stay inside a memory limit.

    Args:
        flex: a FlexConfig. Everything else is as in `transformers.Trainer`.
    """


class _Callbacks:
    """What callbacks have counted in this step so far: a micro-batch that runs twice counts once."""

    def __init__(self, trainer: Trainer) -> None:
        callbacks = trainer.callback_handler.callbacks
        self._remembered = [one.remember() for one in callbacks if callable(getattr(one, "remember", None))]

    def restore(self) -> None:
        for one in self._remembered:
            if one is not None:
                one.restore()


def _refuse_arguments(args: TrainingArguments) -> None:
    """Refuse what the engine cannot see into: compiled regions, and copies of the model made anew in each forward.

    Raises:
        ValueError: torch_compile, or several GPUs for this one process.
    """
    if args.torch_compile:
        raise UserError(
            "torch_compile=True does not go together with FlexTrainer: activations inside compiled regions cannot be "
            "managed per operator. Set torch_compile=False, or use transformers' Trainer for a compiled run."
        )
    if args.n_gpu > 1:
        raise UserError(
            f"this process sees {args.n_gpu} GPUs, and Trainer would copy the model to all of them in every step "
            "(nn.DataParallel), which FlexTrainer cannot manage. Start one process per GPU with accelerate launch, or "
            "show this process one GPU with CUDA_VISIBLE_DEVICES=0."
        )
