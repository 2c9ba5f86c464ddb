"""A plain Accelerate training loop under a memory limit: attach FlexPlugin after `prepare`, detach it at the end.

    python examples/accelerate_loop.py --tiny
    accelerate launch examples/accelerate_loop.py --model Qwen/Qwen1.5-MoE-A2.7B --text texts.txt --memory-limit 70GiB

Forward and backward are in a function that the plugin runs: where memory runs out, it takes the optimizer step back
and runs it again in less memory.

`--tiny` trains a small Mixtral with random weights on the help pages of this Python, as bytes: no network, no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    DataCollatorForLanguageModeling,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from flex_trainer import FlexConfig, FlexPlugin, FlexRuntime
from flex_trainer.units import format_bytes


def main(argv: Sequence[str] | None = None) -> FlexRuntime:
    options = parse(argv)
    set_seed(0)
    tokenizer: Any
    if options.tiny:
        tokenizer = ByT5Tokenizer()
        model = tiny_moe(tokenizer)
        text = "\n\n".join(topics.values())[:100_000]
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
        text = Path(options.text).read_text(encoding="utf-8")
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    encoded = [dict(tokenizer(paragraph, truncation=True, max_length=1024)) for paragraph in paragraphs]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)

    accelerator = Accelerator(cpu=options.tiny, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if options.tiny else 1e-5)
    loader: Any = DataLoader(encoded, batch_size=2, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    plugin = FlexPlugin(FlexConfig(memory_limit=options.memory_limit))
    flex = plugin.attach(accelerator)
    model.train()

    def forward_and_backward(batch: Any) -> torch.Tensor:
        loss = model(**batch).loss
        accelerator.backward(loss)
        return loss.detach()

    for number, batch in enumerate(loader):
        if number == options.micro_batches:
            break
        with accelerator.accumulate(model):
            # Where memory runs out, what this step has run is rolled back and retried in less memory.
            loss = plugin.run(forward_and_backward, batch)
            optimizer.step()
            optimizer.zero_grad()
        record = flex.records[-1]  # of the micro-batch whose backward has just ended
        accelerator.print(
            f"step {record.step}  loss {loss.item():.3f}  tokens {record.num_tokens}  "
            f"held {format_bytes(record.actual_bytes)}  peak {format_bytes(record.peak_bytes)} "
            f"of {format_bytes(record.limit_bytes)}"
        )
    plugin.detach()
    accelerator.end_training()
    return flex


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="An Accelerate loop with FlexPlugin.")
    parser.add_argument("--model", help="name on the hub, or a directory")
    parser.add_argument("--text", help="a text file; an empty line ends a sample")
    parser.add_argument("--tiny", action="store_true", help="a small model with random weights, on the CPU")
    parser.add_argument("--memory-limit", default="auto", help="12GiB, or 80%% of the device; default: auto")
    parser.add_argument("--micro-batches", type=int, default=8, help="how many to train on")
    options = parser.parse_args(argv)
    if not options.tiny and (options.model is None or options.text is None):
        parser.error("give --model and --text, or --tiny")
    return options


def tiny_moe(tokenizer: Any) -> PreTrainedModel:
    """A Mixtral of two layers with four experts each, two per token."""
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


if __name__ == "__main__":
    main()
