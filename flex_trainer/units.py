"""Byte sizes and shares as users write them (`"1.4GiB"`, `"80%"`) and as programs count them (integers)."""

from __future__ import annotations

import re
from decimal import Decimal

from flex_trainer.errors import UserError

_UNIT_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_FRACTION = re.compile(r"\s*(0?\.\d+|1\.0+)\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read a size with a unit, such as `"1.4GiB"` or `"800 MB"`, as a number of bytes.

    Raises:
        ValueError: when `text` is not a number followed by one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is not a size; write a number and a unit, for example '12GiB' or '800MB'")
    number, unit = match.groups()
    return int(Decimal(number) * _UNIT_BYTES[unit.upper()])


def parse_share(text: str) -> float | None:
    """Read a share as a number: `"80%"` and `"0.8"` are 0.8. None for other text, also for whole numbers."""
    if match := _PERCENT.fullmatch(text):
        return float(Decimal(match[1]) / 100)
    return float(text) if _FRACTION.fullmatch(text) else None


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes for a person: `format_bytes(1503238553) == "1.40 GiB"`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
