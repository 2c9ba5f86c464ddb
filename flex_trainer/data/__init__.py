"""Text to token batches: `build_dataset` reads a source, tokenises it and cuts it into samples of drawn lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flex_trainer.data.config import DataConfig, SamplingConfig

if TYPE_CHECKING:
    from flex_trainer.data.samples import TokenDataset

__all__ = ["DataConfig", "SamplingConfig", "build_dataset", "byte_tokenizer"]


def byte_tokenizer() -> Any:
    """The byte-level tokenizer of ByT5 (384 ids: 3 special ones, 256 bytes, 125 unused). It needs no files."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def build_dataset(
    config: DataConfig, tokenizer: Any, batch_size: int = 1, num_samples: int | None = None
) -> TokenDataset:
    """Read, tokenise and cut the text that `config` names. The same config gives the same samples.

    Args:
        tokenizer: any transformers tokenizer; documents are joined by its end-of-sequence token where it has one.
        batch_size: samples of one micro-batch on one process; they share one length.
        num_samples: used when `config.num_samples` is not set. None: all the text, held in memory (4 bytes a token).

    Raises:
        ValueError: a source that cannot be read, or that yields nothing.
    """
    from flex_trainer.data.samples import make_samples
    from flex_trainer.data.sources import open_documents

    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end if text else []

    wanted = config.num_samples if config.num_samples is not None else num_samples
    if wanted is not None:
        wanted += config.num_eval_samples
    return make_samples(config, open_documents(config), encode, batch_size, wanted)
