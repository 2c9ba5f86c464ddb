"""Callbacks of the Hugging Face Trainer: what FlexTrainer does is shown, and experts are balanced."""

from flex_trainer.callbacks.memory import FlexMemoryCallback
from flex_trainer.callbacks.progress import FlexProgressCallback, close_bars, use_flex_progress
from flex_trainer.callbacks.router_bias import LossFreeBalancing
from flex_trainer.callbacks.values import FlexLog, flex_logs, reduce_over_ranks

__all__ = [
    "FlexLog",
    "FlexMemoryCallback",
    "FlexProgressCallback",
    "LossFreeBalancing",
    "close_bars",
    "flex_logs",
    "reduce_over_ranks",
    "use_flex_progress",
]
