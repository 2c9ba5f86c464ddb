"""One side of a comparison, in a process of its own: its memory peak, its limit and its losses are its own."""

from __future__ import annotations

import random
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from flex_trainer.bench.peers import PeerUnavailableError, enable
from flex_trainer.config import FlexConfig
from flex_trainer.data.stdlib import stdlib_documents
from flex_trainer.memory.enforce import enforce_process_limit, return_freed_memory
from flex_trainer.memory.process import process_memory
from flex_trainer.trainer import FlexTrainer


class ByteText(Dataset):
    """Fixed-length pieces of the standard library's text, as bytes; the length may differ per batch."""

    def __init__(self, lengths: list[int]) -> None:
        longest = max(lengths)
        text = b""
        for document in stdlib_documents("code", seed=0):
            text += document.encode()
            if len(text) > 64 * longest:
                break
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = self._lengths[index]
        start = index * 7919 % (len(self._bytes) - length)
        tokens = self._bytes[start : start + length].long() + 3  # ByT5's ids: three special tokens come first
        return {"input_ids": tokens, "labels": tokens}


class ExactLosses:
    """Mixin of a Trainer that keeps every micro-batch's loss as it is (the log rounds it)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exact_losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.exact_losses.append(float(loss))
        return loss


class PlainTrainer(ExactLosses, Trainer):
    """transformers' Trainer, with exact losses; its steps run inside of `around`."""

    around: AbstractContextManager[Any] = nullcontext()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.around:
            return super().training_step(*args, **kwargs)


class ManagedTrainer(ExactLosses, FlexTrainer):
    """FlexTrainer, with exact losses."""


class StepTimes(TrainerCallback):
    """Seconds of every optimizer step: of the clock, and of all cores (less disturbed by other processes)."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.core_seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start, self._start_on_cores = time.perf_counter(), time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.core_seconds.append(time.process_time() - self._start_on_cores)
        self.seconds.append(time.perf_counter() - self._start)


def train(
    *,
    architecture: str,
    config: dict[str, Any],
    batch_size: int,
    lengths: list[int],
    side: str,
    limit_bytes: int | None = None,
    enforce_bytes: int | None = None,
    strategies: list[str] | None = None,
) -> dict[str, Any]:
    """Train one step per entry of `lengths` and say what happened.

    Args:
        side: "flex", or one of `PEERS`. One that cannot run here answers with nothing but "unavailable": why.
        limit_bytes: FlexTrainer's memory limit; None: "auto".
        enforce_bytes: a real cap on the process, set once the model is built.
    """
    # Bit-equal losses need kernels that repeat; on several threads some of torch's CPU kernels do not by default.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # The same for all sides: freed tensors go back to the system, so that a peak means something.
    return_freed_memory()
    set_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**config))
    times = StepTimes()
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="flex-bench-"),
        max_steps=len(lengths),
        per_device_train_batch_size=batch_size,
        learning_rate=1e-3,
        logging_steps=len(lengths),
        save_strategy="no",
        report_to="none",
        use_cpu=True,  # peaks and caps are those of the process
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    dataset = ByteText([length for length in lengths for _ in range(batch_size)])
    around: AbstractContextManager[Any] = nullcontext()
    if side != "flex":
        try:
            around = enable(side, model)
        except PeerUnavailableError as error:
            return {"unavailable": str(error)}
    trainer: PlainTrainer | ManagedTrainer
    if side == "flex":
        flex = FlexConfig(
            memory_limit="auto" if limit_bytes is None else limit_bytes,
            strategies=tuple(strategies or ("recompute", "offload")),
        )
        trainer = ManagedTrainer(model=model, args=args, train_dataset=dataset, callbacks=[times], flex=flex)
    else:
        trainer = PlainTrainer(model=model, args=args, train_dataset=dataset, callbacks=[times])
        trainer.around = around
    if enforce_bytes is not None:
        enforce_process_limit(enforce_bytes)
    trainer.train()
    result: dict[str, Any] = {
        "losses": trainer.exact_losses,
        "seconds": times.seconds,
        "core_seconds": times.core_seconds,
        "peak_bytes": process_memory().peak_rss_bytes,
    }
    if isinstance(trainer, ManagedTrainer):
        result["records"] = [
            {**vars(record), "freed_bytes": dict(record.freed_bytes)} for record in trainer.flex.records
        ]
    return result


def varied_lengths(num: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Lengths between `shortest` and `longest`, multiples of 8: most are short, a few are long."""
    rng = random.Random(seed)
    drawn = [shortest + (longest - shortest) * rng.random() ** 2 for _ in range(num)]
    lengths = [round(length / 8) * 8 for length in drawn]
    lengths[num // 3] = longest
    return lengths
