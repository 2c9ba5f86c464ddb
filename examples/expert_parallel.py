"""Experts on several ranks in a script of your own: weights are loaded in shards, tokens travel to their experts.

    accelerate launch --num_processes 2 --num_machines 1 --multi_gpu examples/expert_parallel.py --tiny
    accelerate launch --num_processes 8 --num_machines 1 --multi_gpu examples/expert_parallel.py \\
        --model Qwen/Qwen3-30B-A3B --text texts.txt --ep 8

`--tiny` saves a small Mixture-of-Experts model (Qwen3-MoE, random weights) first and loads that: no network, no GPU.
Three things differ from a script for one process: `import flex_trainer` (which makes ep_implementation="flex" known to
transformers), `distributed_config`, and the summary of all ranks at the end.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainingArguments,
    set_seed,
)
from transformers.distributed.configuration_utils import DistributedConfig

from flex_trainer import FlexConfig, FlexTrainer
from flex_trainer.launch.failing_rank import ranks_fail_together, watch
from flex_trainer.reports import gather_ranks, rank_table, summary_table


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would build its mesh of GPUs where there are any
    args = TrainingArguments(
        output_dir=str(options.output_dir),
        max_steps=options.steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3 if options.tiny else 1e-5,
        bf16=not options.tiny,
        use_cpu=options.tiny,
        dataloader_pin_memory=not options.tiny,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    watch()  # the process group is there now: end when another rank fails
    set_seed(0)
    tokenizer, path, text = tiny(args, options) if options.tiny else given(options)
    # Each rank reads its shard of the dense weights, and the experts that are its own.
    spread = DistributedConfig(
        fsdp_size=args.world_size, ep_size=options.ep or args.world_size, ep_implementation="flex"
    )
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=spread, dtype="auto")
    trainer = FlexTrainer(
        model=model,
        args=args,
        train_dataset=tokenize(text.split("\n\n"), tokenizer, 256 if options.tiny else 2048),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        flex=FlexConfig(memory_limit=options.memory_limit),
    )
    trainer.train()
    ranks = gather_ranks(trainer.flex)  # every rank takes part
    if trainer.is_world_process_zero():
        console = Console()
        console.print(summary_table(trainer.flex.records, trainer.flex.limit_bytes, trainer.flex.retries, ranks))
        console.print(rank_table(ranks))
        print("Report:", trainer.flex.report(options.output_dir / "report.html", ranks))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a Mixture-of-Experts model whose experts lie on several ranks.")
    parser.add_argument("--model", help="name on the hub, or a directory")
    parser.add_argument("--text", help="a text file; an empty line ends a sample")
    parser.add_argument("--tiny", action="store_true", help="a small model with random weights, on the CPU")
    parser.add_argument("--ep", type=int, default=None, help="ranks that share the experts (default: all)")
    parser.add_argument(
        "--memory-limit", default="auto", help="of each rank: 12GiB, or 80%% of the device; default: auto"
    )
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/expert_parallel"))
    options = parser.parse_args(argv)
    if not options.tiny and (options.model is None or options.text is None):
        parser.error("give --model and --text, or --tiny")
    return options


def tiny(args: TrainingArguments, options: argparse.Namespace) -> tuple[Any, Path, str]:
    """A Qwen3-MoE of two layers with eight experts each, saved by the first rank of a machine."""
    tokenizer: Any = ByT5Tokenizer()
    path = options.output_dir / "tiny"
    with args.main_process_first(desc="saving the tiny model"):
        if args.local_process_index == 0:
            config = Qwen3MoeConfig(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=64,
                moe_intermediate_size=32,
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
            Qwen3MoeForCausalLM(config).save_pretrained(path)
    return tokenizer, path, "\n\n".join(topics.values())[:100_000]


def given(options: argparse.Namespace) -> tuple[Any, str, str]:
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer, options.model, Path(options.text).read_text(encoding="utf-8")


def tokenize(paragraphs: Sequence[str], tokenizer: Any, sequence_length: int) -> list[dict[str, Any]]:
    """One sample per paragraph, cut at `sequence_length`."""
    encoded = (tokenizer(text, truncation=True, max_length=sequence_length) for text in paragraphs if text.strip())
    return [dict(sample) for sample in encoded if len(sample["input_ids"]) > 1]


if __name__ == "__main__":
    with ranks_fail_together():
        main()
