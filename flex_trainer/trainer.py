"""FlexTrainer: transformers' Trainer inside a memory limit. Read this first, then runtime.py.

    trainer = FlexTrainer(model=model, args=args, train_dataset=dataset, flex=FlexConfig(memory_limit="1.4GiB"))
    trainer.train()
    trainer.flex.records                 # one record per micro-batch
    trainer.flex.report("report.html")

The Trainer is left alone: its loop, its loss, its accumulation. The runtime is attached to the model when the first
training step begins (the model is in its final form then) and detached when training ends.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers import Trainer, TrainingArguments

from flex_trainer.callbacks import FlexMemoryCallback, use_flex_progress
from flex_trainer.config import FlexConfig
from flex_trainer.plugin import FlexPlugin
from flex_trainer.runtime import FlexRuntime


class FlexTrainerMixin:
    """Adds FlexTrainer's behaviour to a Trainer class: `class MyTrainer(FlexTrainerMixin, SFTTrainer): ...`.

    Args:
        flex: the settings; memory limit read from the device when None. All other arguments go to the Trainer.
    """

    def __init__(self, *args: Any, flex: FlexConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_compile(self.args)
        self._plugin = FlexPlugin(flex)
        self._memory_callback = FlexMemoryCallback(self.flex)
        self.add_callback(self._memory_callback)
        use_flex_progress(self, self.flex)

    @property
    def flex(self) -> FlexRuntime:
        """The runtime: records, limit, report."""
        return self._plugin.runtime

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().train(*args, **kwargs)
        finally:
            self._plugin.detach()

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._plugin.is_attached:
            self._plugin.attach(self.accelerator, model)
        self.flex.step = self.state.global_step
        return super().training_step(model, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        # Into the Trainer's own call, so that every tracker has the values in the row of the loss.
        gather = gather_object if self.args.world_size > 1 else None
        super().log({**logs, **self._memory_callback.log_values(logs, gather)}, *args, **kwargs)


class FlexTrainer(FlexTrainerMixin, Trainer):
    """A transformers Trainer whose activations stay inside a memory limit.

    Args:
        flex: a FlexConfig. Everything else is as in `transformers.Trainer`.
    """


def _refuse_compile(args: TrainingArguments) -> None:
    """Say that flex wins over torch.compile: the engine cannot see into compiled regions."""
    if args.torch_compile:
        raise ValueError(
            "torch_compile=True does not go together with FlexTrainer: activations inside compiled regions cannot be "
            "managed per operator. Set torch_compile=False, or use transformers' Trainer for a compiled run."
        )
