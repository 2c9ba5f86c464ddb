"""Every setting is checked when it is made: the value, what it must be, and the nearest right one."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from flex_trainer.config import FlexConfig, amount_bytes

GIB = 2**30


def test_defaults() -> None:
    config = FlexConfig()
    assert config.strategies == ("recompute", "offload")
    assert config.limit_bytes(8 * GIB, 8 * GIB) == 8 * GIB
    assert config.offload_directory is None


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("auto", 8 * GIB),
        ("1.5GiB", int(1.5 * GIB)),
        (123456, 123456),
        (0.5, 4 * GIB),
        (1.0, 8 * GIB),
        (2.0**31, 2**31),
        ("50%", 4 * GIB),
        (" 12.5 % ", GIB),
        ("100%", 8 * GIB),
        ("0.25", 2 * GIB),
        (".5", 4 * GIB),
        ("1.0", 8 * GIB),
    ],
)
def test_limit_in_bytes(limit: Any, expected: int) -> None:
    assert FlexConfig(limit).limit_bytes(8 * GIB, 8 * GIB) == expected


def test_amounts() -> None:
    assert amount_bytes("2KiB", 10**6) == 2048
    assert amount_bytes(0.25, 1000) == 250
    assert amount_bytes("25%", 1000) == 250
    assert amount_bytes("7.3%", 1000) == 73
    assert amount_bytes(1, 1000) == 1  # a whole number is bytes, a float up to 1 a fraction


def test_lists_and_single_names_become_a_tuple_without_repeats() -> None:
    assert FlexConfig(strategies=["offload", "recompute", "offload"]).strategies == ("offload", "recompute")  # type: ignore[arg-type]
    assert FlexConfig(strategies="quantize").strategies == ("quantize",)  # type: ignore[arg-type]
    assert FlexConfig(strategies=()).strategies == ()


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        FlexConfig().memory_limit = "1GiB"  # type: ignore[misc]


def test_directory() -> None:
    assert FlexConfig(offload_to="/fast/disk").offload_directory == Path("/fast/disk")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategies": ("recompte",)}, r"unknown strategy 'recompte' in strategies; did you mean 'recompute'\?"),
        ({"strategies": ("paging",)}, r"unknown strategy 'paging' in strategies; known: recompute, offload, quantize"),
        ({"strategies": (1,)}, r"strategies=\(1,\) must be a list of names"),
        ({"quantize_dtype": "int4"}, r"quantize_dtype='int4' is not known"),
        ({"planner": "bandwith"}, r"planner='bandwith' is not known; did you mean 'bandwidth'\?"),
        ({"memory_limit": "12 parsecs"}, r"memory_limit: .*12 parsecs.*, or a fraction such as 0.8 or '80%'"),
        ({"memory_limit": "1"}, r"memory_limit: '1' is not a size; .* or a fraction"),
        ({"memory_limit": "120%"}, r"memory_limit='120%' is more than the whole; give at most '100%'"),
        ({"memory_limit": "0%"}, r"memory_limit='0%' must be positive"),
        ({"memory_limit": "-5%"}, r"memory_limit: '-5%' is not a size"),
        ({"transient_reserve": "100%"}, r"transient_reserve='100%' would leave nothing; give a fraction below 1"),
        ({"transient_reserve": "plenty"}, r"transient_reserve: 'plenty' is not a size.*'80%'"),
        ({"memory_limit": 0}, r"memory_limit=0 must be positive and below an exbibyte"),
        ({"memory_limit": -1}, r"memory_limit=-1 must be positive"),
        ({"memory_limit": float("nan")}, r"memory_limit=nan must be positive and below an exbibyte"),
        ({"memory_limit": float("inf")}, r"memory_limit=inf must be positive and below an exbibyte"),
        ({"memory_limit": 1.5}, r"memory_limit=1.5 is neither a fraction"),
        ({"memory_limit": True}, r"memory_limit=True must be 'auto', a size"),
        ({"memory_limit": None}, r"memory_limit=None must be 'auto', a size"),
        ({"memory_limit": ["1GiB"]}, r"memory_limit=\['1GiB'\] must be 'auto'"),
        ({"transient_reserve": 1.0}, r"transient_reserve=1.0 would leave nothing"),
        ({"transient_reserve": -5}, r"transient_reserve=-5 must be positive"),
        ({"offload_to": ""}, r"offload_to='' must be 'host' or the path of a directory"),
        ({"offload_to": 3}, r"offload_to=3 must be"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlexConfig(**values)


def test_no_reserve_is_fine() -> None:
    assert FlexConfig(transient_reserve=0).transient_reserve == 0


def test_mapping() -> None:
    assert FlexConfig.from_mapping({"memory_limit": "1GiB", "strategies": ["recompute"]}) == FlexConfig(
        "1GiB", ("recompute",)
    )
    with pytest.raises(ValueError, match=r"unknown key 'memory_limt' in flex; did you mean 'memory_limit'\?"):
        FlexConfig.from_mapping({"memory_limt": "1GiB"})
    with pytest.raises(ValueError, match=r"unknown key 'colour' in flex; known: memory_limit, strategies"):
        FlexConfig.from_mapping({"colour": "red"})
