"""From documents to samples: draw a length and a domain for each micro-batch, then cut the domain's tokens to it.

Documents of a domain follow each other, separated by the end-of-sequence token, as one stream of tokens. Sample i takes
the next tokens of its domain's stream, so no token is used twice and the result depends on the seed alone:

    micro-batch        0         1                  2
    length class       1x        3x                 1x
    samples (batch 2)  |a|b|     |-- a --|-- b --|  |a|b|
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from flex_trainer.data.config import DataConfig
from flex_trainer.errors import UserError

_NUM_CLASSES = 8  # skewed lengths are multiples of an eighth of the sequence length
_SKEW = {1: 40, 2: 24, 3: 14, 4: 9, 6: 8, 8: 5}  # multiple: weight; one micro-batch in twenty has the full length
_FEWEST_TOKENS = 2  # a sample predicts each token from those before it, so it needs two


class TokenDataset(Dataset[dict[str, Any]]):
    """Samples held in memory as arrays of token ids. Item i: `{"input_ids": int64 array (length,)}`."""

    def __init__(self, samples: list[np.ndarray], domains: list[str]) -> None:
        self.samples = samples
        self.domains = domains
        """Domain of each sample."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.samples[index].astype(np.int64)}

    @property
    def num_tokens(self) -> int:
        return sum(len(sample) for sample in self.samples)

    def split_off(self, num_samples: int) -> tuple[TokenDataset, TokenDataset]:
        """The samples without the last `num_samples`, and those."""
        keep = len(self) - num_samples
        return (
            TokenDataset(self.samples[:keep], self.domains[:keep]),
            TokenDataset(self.samples[keep:], self.domains[keep:]),
        )


class _TokenStream:
    """The tokens of one domain, read forward; documents are tokenised as they are needed."""

    def __init__(self, documents: Iterator[str], encode: Callable[[str], list[int]]) -> None:
        self._documents = documents
        self._encode = encode
        self._pending: deque[np.ndarray] = deque()
        self._num_pending = 0

    def take(self, num_tokens: int) -> np.ndarray:
        """The next `num_tokens` token ids; fewer, down to none, when the stream ends."""
        while self._num_pending < num_tokens:
            document = next(self._documents, None)
            if document is None:
                break
            tokens = np.asarray(self._encode(document), dtype=np.int32)
            self._pending.append(tokens)
            self._num_pending += len(tokens)
        pieces: list[np.ndarray] = []
        missing = min(num_tokens, self._num_pending)
        self._num_pending -= missing
        while missing:
            piece = self._pending.popleft()
            if len(piece) > missing:
                self._pending.appendleft(piece[missing:])
                piece = piece[:missing]
            pieces.append(piece)
            missing -= len(piece)
        return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)


def make_samples(
    config: DataConfig,
    documents: dict[str, Iterator[str]],
    encode: Callable[[str], list[int]],
    batch_size: int,
    num_samples: int | None,
) -> TokenDataset:
    """Cut `documents` (by domain) into samples; each run of `batch_size` samples shares one length.

    Args:
        encode: token ids of one document, end of sequence included.
        batch_size: samples of one micro-batch on one process.
        num_samples: how many to make at most; None takes all the text. A text that ends early gives fewer.

    Raises:
        ValueError: there was not even one sample.
    """
    draw = random.Random(config.seed)
    streams = {domain: _TokenStream(texts, encode) for domain, texts in documents.items()}
    open_domains = sorted(streams)
    samples: list[np.ndarray] = []
    domains: list[str] = []
    micro_batch, length, block_domain = -1, 0, ""
    while open_domains and (num_samples is None or len(samples) < num_samples):
        # Step 1: at the start of a micro-batch draw its length; at the start of a block its domain.
        if len(samples) // batch_size != micro_batch:
            micro_batch = len(samples) // batch_size
            length = _draw_length(draw, config)
            if micro_batch % config.sampling.block == 0 or block_domain not in open_domains:
                block_domain = draw.choice(open_domains)
        # Step 2: cut one sample. The last one of a domain may be shorter; a domain that is used up leaves the draw.
        domain = block_domain if config.sampling.domains == "blocked" else draw.choice(open_domains)
        tokens = streams[domain].take(length)
        if len(tokens) < _FEWEST_TOKENS:
            open_domains.remove(domain)
            block_domain = draw.choice(open_domains) if open_domains else ""
            continue
        samples.append(tokens)
        domains.append(domain)
    if not samples:
        source = config.name or ", ".join(config.files)
        raise UserError(
            f"data from {source!r} yields nothing to train on: it holds no text of {_FEWEST_TOKENS} tokens or more; "
            "name another file, dataset, split or text_column"
        )
    return TokenDataset(samples, domains)


def _draw_length(draw: random.Random, config: DataConfig) -> int:
    whole = config.sequence_length
    shortest = max(1, whole // _NUM_CLASSES)
    if config.sampling.lengths == "fixed":
        return whole
    if config.sampling.lengths == "uniform":
        return draw.randint(shortest, whole)
    multiple = draw.choices(list(_SKEW), weights=list(_SKEW.values()))[0]
    return whole if multiple == _NUM_CLASSES else shortest * multiple
