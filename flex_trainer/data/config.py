"""What to train on: the recipe's `data` section."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flex_trainer.errors import UserError

STDLIB = "stdlib"
STDLIB_DOMAINS = ("code", "prose", "data")
LENGTHS = ("fixed", "uniform", "skewed")
FILE_SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class SamplingConfig:
    """How lengths and domains vary over the run. The samples of one micro-batch always share one length."""

    lengths: Literal["fixed", "uniform", "skewed"] = "fixed"
    """fixed: `sequence_length` always. uniform: anything from an eighth of it to all of it. skewed: mostly short, 1x to
    8x an eighth of it, with now and then a micro-batch of the full length."""

    domains: Literal["mixed", "blocked"] = "mixed"
    """mixed: each sample from a random domain. blocked: `block` micro-batches in a row from one domain."""

    block: int = 8
    """Micro-batches in a row from one domain, when domains are blocked."""

    def __post_init__(self) -> None:
        if self.block < 1:
            raise UserError(f"block={self.block} must be at least 1 micro-batch")


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it becomes samples.

    Raises:
        ValueError: no source or two of them, an unknown domain, a length or number out of range.
    """

    name: str | None = None
    """`stdlib` (text of this Python's standard library, no network), or a dataset of the `datasets` library."""

    files: tuple[str, ...] = ()
    """Local files instead of a name: text (.txt, .md), JSON Lines (.jsonl, .json) or Parquet (.parquet)."""

    config: str | None = None
    """Configuration of the named dataset, such as a language or a version."""

    split: str = "train"
    """Split of the named dataset."""

    text_column: str = "text"
    """Column with the text, for a named dataset, JSON Lines and Parquet."""

    tokenizer: str | None = None
    """Name or directory of a tokenizer. Default: the model's own, or the byte-level ByT5 tokenizer (which needs no
    files) for a model with random weights."""

    sequence_length: int = 1024
    """Tokens of the longest sample."""

    domains: tuple[str, ...] = STDLIB_DOMAINS
    """Parts of the standard library to use: code, prose (docstrings, help topics), data (tables)."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    seed: int = 0
    """Seed of the order of documents, of lengths and of domains."""

    num_samples: int | None = None
    """Most samples to make. Default: what `training.max_steps` needs, or all the text once."""

    num_eval_samples: int = 0
    """Samples set aside for evaluation, taken from the end."""

    def __post_init__(self) -> None:
        if (self.name is None) == (not self.files):
            raise UserError(
                "needs exactly one source: name ('stdlib' or a dataset's name) or files; "
                f"found name={self.name!r}, files={list(self.files)}"
            )
        if self.sequence_length < 8:
            raise UserError(f"sequence_length={self.sequence_length} must be at least 8 tokens")
        if self.num_samples is not None and self.num_samples < 1:
            raise UserError(f"num_samples={self.num_samples} must be at least 1")
        if self.num_eval_samples < 0:
            raise UserError(f"num_eval_samples={self.num_eval_samples} must not be negative")
        if self.name != STDLIB and self.domains != STDLIB_DOMAINS:
            raise UserError(f"domains={list(self.domains)} only apply to name: stdlib, not to {self.name or 'files'}")
        if self.name in (None, STDLIB) and (self.config is not None or self.split != "train"):
            given = f"config={self.config!r}" if self.config is not None else f"split={self.split!r}"
            raise UserError(f"{given} only applies to a named dataset, not to {self.name or 'files'}; remove it")
        if self.name == STDLIB and self.text_column != "text":
            raise UserError(f"text_column={self.text_column!r} does not apply to name: stdlib; remove it")
        if not self.domains:
            raise UserError("domains is empty; name at least one of code, prose, data")
        for domain in self.domains:
            if domain not in STDLIB_DOMAINS:
                raise UserError(f"unknown domain {domain!r} in domains; known: {', '.join(STDLIB_DOMAINS)}")
