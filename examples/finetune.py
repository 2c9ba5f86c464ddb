"""Fine-tune a causal language model with FlexTrainer: a Trainer script with one class and one argument changed.

    python examples/finetune.py --tiny
    python examples/finetune.py --model Qwen/Qwen3-30B-A3B --text texts.txt --memory-limit 0.9

`--tiny` builds a small Mixture-of-Experts model (OLMoE, random weights) and trains it on the help pages of this Python,
as bytes: no network, no GPU, some seconds on one core. Otherwise the model and its tokenizer come from a directory or
from the Hugging Face hub.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)

from flex_trainer import FlexConfig, FlexTrainer
from flex_trainer.reports import summary_table


def main(argv: Sequence[str] | None = None) -> FlexTrainer:
    options = parse(argv)
    set_seed(0)
    if options.tiny:
        tokenizer: Any = ByT5Tokenizer()
        model = tiny_moe(tokenizer)
        text = "\n\n".join(topics.values())[:100_000]
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        text = Path(options.text).read_text(encoding="utf-8")
    dataset = tokenize(text.split("\n\n"), tokenizer, options.sequence_length)

    args = TrainingArguments(
        output_dir=str(options.output_dir),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=1e-3 if options.tiny else 1e-5,
        bf16=not options.tiny and torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        use_cpu=options.tiny,
        dataloader_pin_memory=not options.tiny,
        logging_steps=1 if options.tiny else 10,
        save_strategy="no",
        report_to="none",
    )
    # The two differences from a script with transformers' Trainer: the class, and `flex`.
    trainer = FlexTrainer(
        model=model,
        args=args,
        train_dataset=dataset,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        flex=FlexConfig(memory_limit=options.memory_limit),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        from rich.console import Console

        Console().print(summary_table(trainer.flex.records, trainer.flex.limit_bytes, trainer.flex.retries))
        print("Report:", trainer.flex.report(options.output_dir / "report.html"))
    return trainer


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model with FlexTrainer.")
    parser.add_argument("--model", help="name on the hub, or a directory")
    parser.add_argument("--text", help="a text file; an empty line ends a sample")
    parser.add_argument("--tiny", action="store_true", help="a small model with random weights, on the CPU")
    parser.add_argument("--memory-limit", default="auto", help="12GiB, or 80%% of the device; default: auto")
    parser.add_argument("--steps", type=int, default=None, help="optimizer steps (default: 6 with --tiny, else 200)")
    parser.add_argument("--batch-size", type=int, default=2, help="samples of one micro-batch")
    parser.add_argument("--sequence-length", type=int, default=None, help="most tokens of a sample (256, else 2048)")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/finetune"))
    options = parser.parse_args(argv)
    if not options.tiny and (options.model is None or options.text is None):
        parser.error("give --model and --text, or --tiny")
    options.steps = options.steps or (6 if options.tiny else 200)
    options.sequence_length = options.sequence_length or (256 if options.tiny else 2048)
    return options


def tiny_moe(tokenizer: Any) -> PreTrainedModel:
    """An OLMoE of two layers with eight experts each, two per token."""
    config = OlmoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
    )
    return OlmoeForCausalLM(config)


def tokenize(paragraphs: Sequence[str], tokenizer: Any, sequence_length: int) -> list[dict[str, Any]]:
    """One sample per paragraph, cut at `sequence_length`. Lengths differ, so micro-batches differ in what they need."""
    encoded = (tokenizer(text, truncation=True, max_length=sequence_length) for text in paragraphs if text.strip())
    return [dict(sample) for sample in encoded if len(sample["input_ids"]) > 1]


if __name__ == "__main__":
    main()
