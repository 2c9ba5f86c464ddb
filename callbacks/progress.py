"""The Trainer's progress bar with the memory beside the speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import ProgressCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from flex_trainer.callbacks.values import GIB_BYTES, Runtime
from flex_trainer.records import MicroBatchRecord

if TYPE_CHECKING:
    from transformers.trainer import Trainer


class FlexProgressCallback(ProgressCallback):
    """The bar of `ProgressCallback`, ended by the run's memory peak against the limit and the spikes met so far.

    Log rows are printed above the bar without the `flex/` values: a row of thirty numbers cannot be read there, and
    trackers and the report have them.

    Args:
        runtime: the runtime whose records are shown.
        max_str_len: as in `ProgressCallback`.
    """

    def __init__(self, runtime: Runtime, max_str_len: int = 100) -> None:
        super().__init__(max_str_len=max_str_len)
        self.runtime = runtime
        self._next = runtime.records.num_total
        self._peak_bytes = 0
        self._num_spikes = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._next = self.runtime.records.num_total
        self._peak_bytes = self._num_spikes = 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._read(self.runtime.records.since(self._next))
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(self.postfix, refresh=False)
        super().on_step_end(args, state, control, **kwargs)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        shown = {name: value for name, value in (logs or {}).items() if not name.startswith("flex/")}
        super().on_log(args, state, control, logs=shown, **kwargs)

    @property
    def postfix(self) -> str:
        """For example `mem peak 1.21/1.40 GiB, spikes 3`."""
        peak_gib, limit_gib = self._peak_bytes / GIB_BYTES, self.runtime.limit_bytes / GIB_BYTES
        return f"mem peak {peak_gib:.2f}/{limit_gib:.2f} GiB, spikes {self._num_spikes}"

    def _read(self, new_records: Sequence[MicroBatchRecord]) -> None:
        self._next = self.runtime.records.num_total
        self._peak_bytes = max([self._peak_bytes, *(record.peak_bytes for record in new_records)])
        self._num_spikes += sum(record.is_spike for record in new_records)


def close_bars(trainer: Trainer) -> None:
    """End the bars of a training that has failed, so that what is printed next begins a line of its own."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ProgressCallback):
            for name in ("prediction_bar", "training_bar"):
                bar = getattr(callback, name, None)
                if bar is not None:
                    bar.close()
                    setattr(callback, name, None)


def use_flex_progress(trainer: Trainer, runtime: Runtime) -> bool:
    """Put a `FlexProgressCallback` where `trainer` has the plain bar; say whether there was one.

    A notebook's table, a printer (`disable_tqdm=True`) and a user's own subclass stay as they are.
    """
    callbacks = trainer.callback_handler.callbacks
    for index, callback in enumerate(callbacks):
        if type(callback) is ProgressCallback:
            callbacks[index] = FlexProgressCallback(runtime, max_str_len=callback.max_str_len)
            return True
    return False
