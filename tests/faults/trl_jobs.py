"""Trainers of TRL with the mixin, for a process of their own: what was predicted and what the process's meter saw."""

from __future__ import annotations

import importlib
import os
import random
import tempfile
import warnings
from typing import Any

os.environ["TQDM_DISABLE"] = "1"

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from flex_trainer.config import FlexConfig
from flex_trainer.testing.tiny import tiny_model
from flex_trainer.trainer import FlexTrainerMixin

trl: Any = importlib.import_module("trl")

_NUM_WORDS = 8000
_NUM_TOKENS = 128
_BATCH_SIZE = 4


class FlexDPOTrainer(FlexTrainerMixin, trl.DPOTrainer):
    pass


class FlexSFTTrainer(FlexTrainerMixin, trl.SFTTrainer):
    pass


class FlexGRPOTrainer(FlexTrainerMixin, trl.GRPOTrainer):
    pass


def dpo(memory_limit: str) -> list[dict[str, Any]]:
    rows = [{"prompt": _words(8), "chosen": _words(), "rejected": _words()} for _ in range(2 * _BATCH_SIZE)]
    args = trl.DPOConfig(**_common(), gradient_checkpointing=False, max_length=_NUM_TOKENS)
    return _train(FlexDPOTrainer, memory_limit, rows, args, ref_model=_model())


def sft(memory_limit: str) -> list[dict[str, Any]]:
    """Gradient checkpointing as SFTConfig has it by default: on."""
    args = trl.SFTConfig(**_common(), max_length=_NUM_TOKENS)
    assert args.gradient_checkpointing
    return _train(FlexSFTTrainer, memory_limit, [{"text": _words()} for _ in range(2 * _BATCH_SIZE)], args)


def grpo(memory_limit: str) -> list[dict[str, Any]]:
    args = trl.GRPOConfig(
        **_common(),
        gradient_checkpointing=False,
        num_generations=2,
        max_completion_length=_NUM_TOKENS // 4,
    )
    rows = [{"prompt": _words(_NUM_TOKENS // 4)} for _ in range(2 * _BATCH_SIZE)]

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text) % 7) for text in completions]

    return _train(FlexGRPOTrainer, memory_limit, rows, args, reward_funcs=reward)


def _train(kind: Any, memory_limit: str, rows: Any, args: Any, **more: Any) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = kind(
            model=_model(),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=_tokenizer(),
            flex=FlexConfig(memory_limit, ("recompute",)),
            **more,
        )
        trainer.train()
    names = ("baseline_bytes", "predicted_bytes", "actual_bytes", "predicted_peak_bytes", "peak_bytes", "is_profile")
    return [
        {**{name: getattr(record, name) for name in names}, "limit_bytes": trainer.flex.limit_bytes}
        for record in trainer.flex.records
    ]


def _common() -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": 4,
        "per_device_train_batch_size": _BATCH_SIZE,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }


def _model() -> Any:
    return tiny_model(
        "qwen3_moe",
        num_hidden_layers=2,
        vocab_size=_NUM_WORDS,
        pad_token_id=_NUM_WORDS - 3,
        eos_token_id=_NUM_WORDS - 2,
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(_NUM_WORDS - 3)}
    special = {"[PAD]": _NUM_WORDS - 3, "[EOS]": _NUM_WORDS - 2, "[UNK]": _NUM_WORDS - 1}
    tokenizer = Tokenizer(WordLevel({**words, **special}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]", padding_side="left"
    )


def _words(number: int = _NUM_TOKENS) -> str:
    draw = random.Random(number)
    return " ".join(f"w{draw.randrange(_NUM_WORDS - 3)}" for _ in range(number))
