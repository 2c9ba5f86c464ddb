"""Supervised fine-tuning with TRL under a memory limit: FlexTrainerMixin in front of SFTTrainer.

    python examples/sft_with_trl.py --tiny
    python examples/sft_with_trl.py --model Qwen/Qwen1.5-MoE-A2.7B-Chat --dataset trl-lib/Capybara --memory-limit 70GiB

Needs the package `trl`. `--tiny` trains a small Qwen3-MoE with random weights on the help pages of this Python, as
bytes: no network, no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    set_seed,
)
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

from flex_trainer import FlexConfig, FlexTrainerMixin
from flex_trainer.units import format_bytes


class FlexSFTTrainer(FlexTrainerMixin, SFTTrainer):
    """SFTTrainer inside a memory limit. The mixin comes first, so that its methods wrap the other's."""


def main(argv: Sequence[str] | None = None) -> FlexSFTTrainer:
    options = parse(argv)
    set_seed(0)
    dataset: Any
    if options.tiny:
        tokenizer: Any = ByT5Tokenizer()
        model = tiny_moe(tokenizer)
        paragraphs = "\n\n".join(topics.values()).split("\n\n")
        dataset = Dataset.from_list([{"text": paragraph} for paragraph in paragraphs[:100] if paragraph.strip()])
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        dataset = load_dataset(options.dataset, split="train")

    args = SFTConfig(
        output_dir=str(options.output_dir),
        max_steps=options.steps,
        max_length=256 if options.tiny else 4096,
        per_device_train_batch_size=2,
        learning_rate=1e-3 if options.tiny else 1e-5,
        # On by default in TRL. FlexTrainer would turn it off with a warning: it decides itself what is recomputed.
        activation_checkpointing=False,
        bf16=not options.tiny,
        use_cpu=options.tiny,
        dataloader_pin_memory=not options.tiny,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = FlexSFTTrainer(
        model=model,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        flex=FlexConfig(memory_limit=options.memory_limit),
    )
    trainer.train()
    for record in trainer.flex.records:
        print(
            f"micro-batch {record.micro_batch}: {record.num_tokens} tokens, imbalance {record.imbalance:.2f}, "
            f"peak {format_bytes(record.peak_bytes)} of {format_bytes(record.limit_bytes)}"
        )
    return trainer


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="TRL's SFTTrainer with FlexTrainerMixin.")
    parser.add_argument("--model", help="name on the hub, or a directory")
    parser.add_argument("--dataset", help="a dataset in one of TRL's formats")
    parser.add_argument("--tiny", action="store_true", help="a small model with random weights, on the CPU")
    parser.add_argument("--memory-limit", default="auto", help="12GiB, or 80%% of the device; default: auto")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/sft"))
    options = parser.parse_args(argv)
    if not options.tiny and (options.model is None or options.dataset is None):
        parser.error("give --model and --dataset, or --tiny")
    return options


def tiny_moe(tokenizer: Any) -> PreTrainedModel:
    """A Qwen3-MoE of two layers with eight experts each, two per token."""
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
    )
    return Qwen3MoeForCausalLM(config)


if __name__ == "__main__":
    main()
