"""What a user may set: one frozen dataclass, checked when it is made."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flex_trainer.errors import UserError
from flex_trainer.units import parse_bytes, parse_share

STRATEGIES = ("recompute", "offload", "quantize")
QUANTIZE_DTYPES = ("int8", "float8_e4m3fn")
_LARGEST_BYTES = 2**60
AUTO_LIMIT_SHARE = 0.9
"""Share of the free memory that memory_limit "auto" takes: the rest is for what the process allocates outside of its
tensors (the driver, communication libraries, what allocators keep)."""
AUTO_RESERVE_SHARE = 0.015
"""Share of the limit that transient_reserve "auto" keeps free, beside the transients that are modelled."""
_IN_FLIGHT_SHARE, _LEAST_IN_FLIGHT_BYTES = 0.02, 2**24
"""Offload copies on their way may hold this share of the limit, and at least this much."""
METHODS = ("optimal", "bandwidth", "largest_first")
PLANNERS = ("auto", *METHODS)


def nearest(word: str, known: tuple[str, ...] | list[str]) -> str:
    """The sentence part that helps with a misspelt word: the closest known one, or all of them."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


@dataclass(frozen=True)
class FlexConfig:
    """Settings of FlexTrainer. Every field has a default; `FlexConfig()` reads the limit from the device.

    Raises:
        ValueError: a value outside its range, an unknown strategy or dtype.
    """

    memory_limit: str | float | int = "auto"
    """Most memory the process (CPU) or the device (CUDA) may use: "auto", a size such as "12GiB", a whole number of
    bytes (above 1), or a fraction of the device's memory (a float in (0, 1], or text such as "80%")."""

    strategies: tuple[str, ...] = ("recompute", "offload")
    """Ways to give activation memory back, any of recompute, offload, quantize. Quantize changes gradients slightly, so
    it has to be asked for. Empty: watch and report, never mitigate."""

    offload_to: str = "host"
    """Where offloaded activations go: "host" (pinned memory on CUDA; on a CPU device, a file in the system's temporary
    directory), or a directory for the file."""

    quantize_dtype: str = "int8"
    """Storage type of quantized activations: int8 or float8_e4m3fn, one scale per row."""

    transient_reserve: str | float | int = "auto"
    """Bytes kept free for what operators need while they run: "auto" (modelled, then corrected by what was measured), a
    size, a whole number of bytes, or a fraction of the memory limit (a float in [0, 1), or text such as "5%")."""

    seed_profile: str | None = None
    """A JSON file with the sizes and times of operators: read when it exists (what it knows is not traced or measured
    again), written when training ends."""

    trace: str | bool = "auto"
    """Whether the sizes of a micro-batch are found out before it runs, by a run of the model's copy on tensors without
    data. If not, the first micro-batches of each kind run with everything mitigated, and are measured. "auto": where
    all that the forward runs is code of libraries known to compute and nothing else. True: also code of one's own,
    which must have no effect outside of its module (counters, lists of recorded choices, files)."""

    planner: str = "auto"
    """How mitigations are chosen: "optimal" (least added time), or by Algorithm 2 of the BaGuaLu-2 paper, where the
    next mitigation is the one with most bytes freed per second of overhead ("bandwidth") or with most bytes freed
    ("largest_first", the paper's order). "auto" starts with "bandwidth", and goes over to "optimal" once what that may
    save of the time that mitigations add has paid for its longer search."""

    router_bias_update_rate: float = 0.0
    """What a router's bias on the choice of an expert is raised or lowered by after each optimizer step: experts are
    loaded evenly without an auxiliary loss (DeepSeek-V3 used 0.001). 0: biases stay as they are. For models that
    have such a bias: DeepSeek-V3, GLM-4.5 and others."""

    fuse: str | bool = False
    """Whether the forward of a micro-batch runs together with the backward of the one before it, so that the exchanges
    between ranks of each hide behind the other (experts on several ranks, gradient accumulation of 2 or more). "auto":
    where it was found to pay."""

    def __post_init__(self) -> None:
        # Step 1: plain YAML and the command line give lists and strings; inside, a tuple is what the type says.
        if not isinstance(self.strategies, (str, list, tuple)) or any(not isinstance(s, str) for s in self.strategies):
            raise UserError(
                f"strategies={self.strategies!r} must be a list of names, any of {', '.join(STRATEGIES)}; "
                "an empty one mitigates nothing"
            )
        names = [self.strategies] if isinstance(self.strategies, str) else list(self.strategies)
        object.__setattr__(self, "strategies", tuple(dict.fromkeys(names)))
        # Step 2: every field on its own.
        for name in self.strategies:
            if name not in STRATEGIES:
                raise UserError(f"unknown strategy {name!r} in strategies; {nearest(str(name), STRATEGIES)}")
        _check_choice("quantize_dtype", self.quantize_dtype, QUANTIZE_DTYPES)
        if not isinstance(self.trace, bool) and self.trace != "auto":
            raise UserError(f"trace={self.trace!r} must be 'auto', true or false")
        if not isinstance(self.fuse, bool) and self.fuse != "auto":
            raise UserError(f"fuse={self.fuse!r} must be 'auto', true or false")
        _check_choice("planner", self.planner, PLANNERS)
        rate = self.router_bias_update_rate
        if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not 0 <= rate < 1:
            raise UserError(f"router_bias_update_rate={rate!r} must be a number in [0, 1); 0 leaves the biases alone")
        _check_amount("memory_limit", self.memory_limit, fraction_may_be_one=True)
        _check_amount("transient_reserve", self.transient_reserve, fraction_may_be_one=False)
        if self.seed_profile is not None and not isinstance(self.seed_profile, (str, os.PathLike)):
            raise UserError(f"seed_profile={self.seed_profile!r} must be the path of a JSON file, or nothing")
        if not isinstance(self.offload_to, str) or not self.offload_to:
            raise UserError(f"offload_to={self.offload_to!r} must be 'host' or the path of a directory")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> FlexConfig:
        """Make a config from a mapping such as a recipe's `flex` section.

        Raises:
            ValueError: an unknown key, with the nearest known one, or a bad value.
        """
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise UserError(f"unknown key {key!r} in flex; {nearest(key, known)}")
        return cls(**values)

    def limit_bytes(self, device_bytes: int, auto_bytes: int) -> int:
        """The memory limit in bytes on a device that has `device_bytes` in all; "auto" is `auto_bytes`."""
        return auto_bytes if self.memory_limit == "auto" else amount_bytes(self.memory_limit, device_bytes)

    @property
    def offload_directory(self) -> Path | None:
        """The directory for offloaded activations, or None for "host"."""
        return None if self.offload_to == "host" else Path(self.offload_to)


def check_is_config(name: str, value: object) -> None:
    """Refuse settings that are given in another form than a FlexConfig.

    Args:
        name: of the argument.

    Raises:
        ValueError: neither a FlexConfig nor None.
    """
    if value is None or isinstance(value, FlexConfig):
        return
    known = {field.name for field in fields(FlexConfig)}
    given = value if isinstance(value, Mapping) else {"memory_limit": value}
    is_spoken = isinstance(value, (Mapping, str, int, float)) and known.issuperset(given)
    shown = ", ".join(f"{key}={item!r}" for key, item in given.items()) if is_spoken else "memory_limit='2GiB'"
    raise UserError(f"{name} must be a FlexConfig, found {type(value).__name__}; write FlexConfig({shown})")


def in_flight_bound_bytes(limit_bytes: int) -> int:
    """Most that offload copies on their way may hold under a memory limit."""
    return max(int(_IN_FLIGHT_SHARE * limit_bytes), _LEAST_IN_FLIGHT_BYTES)


def amount_bytes(amount: str | float | int, whole_bytes: int) -> int:
    """Bytes of a size ("12GiB"), a whole number of bytes, or a fraction of `whole_bytes` (0.8 or "80%")."""
    if isinstance(amount, str):
        share = parse_share(amount)
        return parse_bytes(amount) if share is None else int(share * whole_bytes)
    return int(amount * whole_bytes) if isinstance(amount, float) and amount <= 1 else int(amount)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name}={value!r} is not known; {nearest(str(value), choices)}")


def _check_amount(name: str, value: object, fraction_may_be_one: bool) -> None:
    if value == "auto":
        return
    is_share = isinstance(value, float)
    if isinstance(value, str):
        share = parse_share(value)
        is_share = share is not None
        try:
            amount: float = parse_bytes(value) if share is None else share
        except UserError as error:
            raise UserError(f"{name}: {error}, or a fraction such as 0.8 or '80%'") from None
        if is_share and amount > 1:
            raise UserError(f"{name}={value!r} is more than the whole; give at most '100%'")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        amount = value
    else:
        raise UserError(
            f"{name}={value!r} must be 'auto', a size such as '12GiB', bytes, or a fraction such as 0.8 or '80%'"
        )
    smallest_ok = amount > 0 if fraction_may_be_one else amount >= 0
    if not smallest_ok or not amount < _LARGEST_BYTES:
        raise UserError(f"{name}={value!r} must be positive and below an exbibyte")
    if is_share and 1 < amount < 1024:
        raise UserError(f"{name}={value!r} is neither a fraction (at most 1) nor a plausible number of bytes")
    if is_share and amount == 1 and not fraction_may_be_one:
        raise UserError(f"{name}={value!r} would leave nothing; give a fraction below 1")
