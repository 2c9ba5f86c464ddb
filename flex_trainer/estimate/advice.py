"""What would make a run fit: every change is tried, and only those that work are named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from flex_trainer.config import AUTO_RESERVE_SHARE
from flex_trainer.cost.hardware import HARDWARE
from flex_trainer.errors import UserError
from flex_trainer.estimate.estimator import Estimator, Outcome
from flex_trainer.estimate.settings import Settings
from flex_trainer.strategy import Strategy
from flex_trainer.units import format_bytes

_SHORTEST_TOKENS = 128
_MOST_FSDP = 8
"""Times as many ranks that are tried at most."""
_LIMIT_STEP = 1.01
_MAX_LIMIT_STEPS = 20
_ALL = (Strategy.RECOMPUTE, Strategy.OFFLOAD, Strategy.QUANTIZE)


@dataclass(frozen=True)
class Suggestion:
    """One change that was found to work."""

    overrides: tuple[str, ...]
    """As on the command line, such as `training.per_device_train_batch_size=2`; "--ranks 64" where that is part of
    it."""
    text: str
    needed_bytes: int


def advise(estimator: Estimator, settings: Settings, imbalance: float) -> list[Suggestion]:
    """The smallest change of each kind with which all ranks fit at this imbalance; empty: none was found."""
    found = []
    for candidates in (
        _accumulation(settings),
        _strategies(settings),
        _batches(settings),
        _lengths(settings),
        _expert_groups(settings, estimator.skeleton.num_experts),
        _shards(settings),
    ):
        suggestion = _first_that_fits(estimator, imbalance, candidates)
        if suggestion is not None:
            found.append(suggestion)
    limit = _limit(estimator, settings, imbalance)
    return [*found, *([limit] if limit is not None else [])]


_Candidate = tuple[Settings, tuple[str, ...], str]


def _first_that_fits(estimator: Estimator, imbalance: float, candidates: Iterable[_Candidate]) -> Suggestion | None:
    for settings, overrides, what in candidates:
        try:
            if estimator.fixed_bytes(settings) > estimator.available_bytes(settings):
                continue  # weights alone are too much
            outcome = estimator.outcome(settings, imbalance)
        except UserError:
            continue  # sizes that do not divide each other: no way to run
        if outcome.fits:
            return _suggestion(overrides, what, outcome)
    return None


def _suggestion(overrides: tuple[str, ...], what: str, outcome: Outcome) -> Suggestion:
    needed_bytes = outcome.worst.needed_bytes
    return Suggestion(overrides, f"{what}: needs {format_bytes(needed_bytes)}", needed_bytes)


def _accumulation(settings: Settings) -> Iterator[_Candidate]:
    if settings.num_micro_batches > 1 and settings.pp == 1:
        yield (
            replace(settings, num_micro_batches=1),
            ("training.gradient_accumulation_steps=1",),
            f"gradient_accumulation_steps 1 instead of {settings.num_micro_batches} (gradients need not wait)",
        )


def _strategies(settings: Settings) -> Iterator[_Candidate]:
    for added in _ALL:
        if added not in settings.strategies:
            strategies = (*settings.strategies, added)
            names = ", ".join(strategy.value for strategy in strategies)
            yield replace(settings, strategies=strategies), (f"flex.strategies=[{names}]",), f"strategies {names}"
    if settings.strategies != _ALL:
        names = ", ".join(strategy.value for strategy in _ALL)
        yield replace(settings, strategies=_ALL), (f"flex.strategies=[{names}]",), f"strategies {names}"


def _batches(settings: Settings) -> Iterator[_Candidate]:
    size = settings.batch_size // 2
    while size >= 1:
        yield (
            replace(settings, batch_size=size),
            (f"training.per_device_train_batch_size={size}",),
            f"per_device_train_batch_size {size} instead of {settings.batch_size}",
        )
        size //= 2


def _lengths(settings: Settings) -> Iterator[_Candidate]:
    length = settings.sequence_length // 2
    while length >= _SHORTEST_TOKENS:
        yield (
            replace(settings, sequence_length=length),
            (f"data.sequence_length={length}",),
            f"sequences of {length} tokens instead of {settings.sequence_length}",
        )
        length //= 2


def _expert_groups(settings: Settings, num_experts: int) -> Iterator[_Candidate]:
    for ep in range(settings.ep + 1, settings.fsdp + 1):
        if num_experts and num_experts % ep == 0 and settings.fsdp % ep == 0:
            yield replace(settings, ep=ep), (f"parallel.ep={ep}",), f"experts over {ep} ranks instead of {settings.ep}"


def _shards(settings: Settings) -> Iterator[_Candidate]:
    """Weights over more ranks: first those there are (fewer replicas), then more of them."""
    there_are = settings.num_ranks or settings.fsdp * settings.pp
    for times in range(2, _MOST_FSDP + 1):
        fsdp = settings.fsdp * times
        num_ranks = there_are if there_are % (fsdp * settings.pp) == 0 else fsdp * settings.pp
        more = f", {num_ranks} ranks in all" if num_ranks > there_are else ""
        yield (
            replace(settings, fsdp=fsdp, num_ranks=num_ranks),
            (f"parallel.fsdp={fsdp}", f"--ranks {num_ranks}"),
            f"weights over {fsdp} ranks instead of {settings.fsdp}{more}",
        )


def _limit(estimator: Estimator, settings: Settings, imbalance: float) -> Suggestion | None:
    """The least memory with which it runs as it is, and which devices have it."""
    needed_bytes = estimator.outcome(settings, imbalance).worst.needed_bytes + estimator.hardware.runtime_bytes
    limit_bytes = int(needed_bytes / (1 - AUTO_RESERVE_SHARE))
    for _ in range(_MAX_LIMIT_STEPS):
        reserve_bytes = max(settings.reserve_bytes, int(AUTO_RESERVE_SHARE * limit_bytes))
        trial = replace(settings, limit_bytes=limit_bytes, reserve_bytes=reserve_bytes)
        outcome = estimator.outcome(trial, imbalance)
        if outcome.fits:
            break
        limit_bytes = int(limit_bytes * _LIMIT_STEP)
    else:
        return None
    large = [hardware.title for hardware in HARDWARE.values() if hardware.memory_bytes >= limit_bytes]
    if limit_bytes <= estimator.hardware.memory_bytes:
        where = "which this device has"
    else:
        where = f"which {' and '.join(large)} have" if large else "which no device of the table has"
    # Rounded up to whole MiB, so that what is written is enough.
    limit_mib = -(-limit_bytes // 2**20)
    return _suggestion(
        (f"flex.memory_limit={limit_mib}MiB",), f"a memory limit of {format_bytes(limit_mib * 2**20)}, {where}", outcome
    )
