"""LossFreeBalancing: experts are loaded evenly without an auxiliary loss, as in DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from flex_trainer.models.router_bias import CountsBefore, RouterBiasBalancer


class LossFreeBalancing(TrainerCallback):
    """After every optimizer step, moves the biases of the routers by which experts were chosen since the last one.

    FlexTrainer installs it where `FlexConfig.router_bias_update_rate` is above 0; it also works with transformers'
    Trainer. Biases are tensors of the model: checkpoints have them. See `models.router_bias` for the rule.

    Args:
        update_rate: what a bias is raised or lowered by in each step.
    """

    def __init__(self, update_rate: float = 1e-3) -> None:
        self.update_rate = update_rate
        self._balancer: RouterBiasBalancer | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._start(kwargs.get("model"))  # before a checkpoint is read: its biases are read into float32

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._start(kwargs.get("model"))

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._balancer is not None:
            self._balancer.step()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop()

    def remember(self) -> CountsBefore | None:
        """The counts as they are now, to be put back where a step is run again; None while nothing is counted."""
        return None if self._balancer is None else self._balancer.remember()

    def _start(self, model: nn.Module | None) -> None:
        self._stop()
        if model is not None:
            self._balancer = RouterBiasBalancer(model, self.update_rate)

    def _stop(self) -> None:
        if self._balancer is not None:
            self._balancer.remove()
            self._balancer = None
