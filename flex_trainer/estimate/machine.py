"""This machine's figures in a file: `flex-trainer profile` writes it, `plan --hardware machine` reads it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flex_trainer.config import nearest
from flex_trainer.cost.hardware import HARDWARE, Attainable, Hardware, knee_bytes, of_device_name
from flex_trainer.cost.roofline import Roofline
from flex_trainer.errors import UserError
from flex_trainer.files import write_whole

MACHINE = "machine"
_DEFAULT = "h100"
_FORMAT = 1


def machine_file() -> Path:
    """Where the figures lie if no other place is given."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flex_trainer" / "machine.json"


def save_machine(measured: dict[str, Any], path: Path) -> Path:
    """Write what `measure_machine` found, whole or not at all.

    Raises:
        ValueError: the file cannot be written.
    """
    return write_whole(path, json.dumps({"format": _FORMAT, **measured}, indent=2) + "\n", "the machine's figures")


def load_machine(path: Path) -> Hardware:
    """Read a file of `save_machine`.

    Raises:
        ValueError: no such file, or not such a file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"--hardware: there is no file {str(path)!r} with this machine's figures; run flex-trainer profile first"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"--hardware: {str(path)!r} is unreadable ({error}); run flex-trainer profile again") from error
    try:
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {_FORMAT}")
        values = dict(content["hardware"])
        values["attainable"] = Attainable(**values["attainable"])
        for name in ("offload", "quantize"):
            values[name] = Roofline(**values[name])
        return Hardware(**values)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"--hardware: {str(path)!r} does not hold the figures of a machine ({type(error).__name__}: {error}); run "
            "flex-trainer profile again"
        ) from error


def gpu_here() -> Hardware | None:
    """This machine's GPU, if it has one of the table."""
    return of_device_name(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def find_hardware(name: str | None) -> Hardware:
    """The device called `name`: one of the table, `machine`, or a file of `flex-trainer profile`. None: the GPU of this
    machine if the table has it, or else the default.

    Raises:
        ValueError: a name that is not known, a file that cannot be read.
    """
    if name is None:
        return gpu_here() or HARDWARE[_DEFAULT]
    if name == MACHINE:
        return load_machine(machine_file())
    if name.lower() in HARDWARE:
        return HARDWARE[name.lower()]
    if name.endswith(".json") or os.sep in name or Path(name).is_file():
        return load_machine(Path(name))
    raise UserError(f"--hardware {name!r} is not known; {nearest(name.lower(), [*HARDWARE, MACHINE])}")


def as_mapping(hardware: Hardware) -> dict[str, Any]:
    """For the file."""
    return {**asdict(hardware), "peak_flops": dict(hardware.peak_flops)}


def knees(hardware: Hardware) -> dict[str, dict[str, float]]:
    """Per mitigation the knee (S bytes, B bytes per second) of the paper's Figure 6."""
    rates = hardware.rates()
    return {
        name: {
            "overhead_seconds": roofline.overhead_seconds,
            "bytes_per_second": roofline.bytes_per_second,
            "knee_bytes": knee_bytes(roofline),
        }
        for name, roofline in (("offload", rates.offload), ("quantize", rates.quantize))
    }
