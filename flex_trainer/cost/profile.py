"""What is known of a model's operators: sizes by shape, times per token. Filled from traces, readable from a file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flex_trainer.activations.trace import Trace
from flex_trainer.cost.graph import ActivationGraph, cut_into_segments
from flex_trainer.cost.scaling import Scaling
from flex_trainer.strategy import Site

_SMOOTHING = 0.3
_QUADRATIC_KINDS = frozenset({"attention_core"})
_FORMAT = 1


@dataclass(frozen=True)
class BatchShape:
    """What the sizes of a micro-batch's activations depend on."""

    batch_size: int
    sequence_length: int
    kind: str = ""
    """Which inputs there are, whether there is padding, dtype and autocast: what may change the operators themselves."""

    @property
    def num_tokens(self) -> int:
        return self.batch_size * self.sequence_length


@dataclass
class _Structure:
    """A sequence of calls and values, of which only sizes and times vary."""

    sites: list[Site]
    parents: list[int]
    inputs: list[list[int]]
    owners: list[int]
    savers: list[list[int]]
    value_scaling: Scaling
    output_scaling: Scaling
    seconds_per_unit: list[float]
    samples: list[dict[str, Any]] = field(default_factory=list)  # (shape, sizes), for the file
    rows_per_token: dict[str, float] = field(default_factory=dict)  # of each experts block: most seen


class Profile:
    """Learns from the traces of micro-batches that were followed by backward."""

    def __init__(self) -> None:
        self._structures: dict[str, _Structure] = {}  # by the kind of batch
        self.version = 0
        """Grows when anything but a time changed: plans made before may be wrong."""

    def knows(self, shape: BatchShape) -> bool:
        return shape.kind in self._structures

    def rows(self, shape: BatchShape, experts: str) -> int | None:
        """Rows that the block called `experts` was planned to get in a micro-batch of this shape."""
        structure = self._structures.get(shape.kind)
        rate = None if structure is None else structure.rows_per_token.get(experts)
        return None if rate is None else round(rate * shape.num_tokens)

    def observe(self, shape: BatchShape, trace: Trace, routed_rows: Mapping[str, int]) -> None:
        """Learn sizes and times from one forward; `routed_rows`: rows that each experts block got."""
        structure = self._structures.get(shape.kind)
        if structure is None or not _same_structure(structure, trace):
            structure = self._structures[shape.kind] = _structure_of(trace)
            self.version += 1
        value_bytes = [value.num_bytes for value in trace.values]
        output_bytes = [call.output_bytes for call in trace.calls]
        sample = {"batch": shape.batch_size, "sequence": shape.sequence_length}
        if not any(all(known[key] == sample[key] for key in sample) for known in structure.samples):
            structure.samples.append({**sample, "values": value_bytes, "outputs": output_bytes})
            self.version += 1
        for experts, num_rows in routed_rows.items():
            rate = num_rows / max(shape.num_tokens, 1)
            structure.rows_per_token[experts] = max(rate, structure.rows_per_token.get(experts, 0.0))
        structure.value_scaling.observe(shape.batch_size, shape.sequence_length, value_bytes)
        structure.output_scaling.observe(shape.batch_size, shape.sequence_length, output_bytes)
        for index, call in enumerate(trace.calls):
            rate = call.seconds / _time_unit(call.site, shape)
            old = structure.seconds_per_unit[index]
            structure.seconds_per_unit[index] = rate if old < 0 else old + _SMOOTHING * (rate - old)

    def graph(self, shape: BatchShape) -> ActivationGraph:
        """The activation graph of a micro-batch of this shape."""
        structure = self._structures[shape.kind]
        return cut_into_segments(
            structure.sites,
            structure.parents,
            structure.inputs,
            [
                max(rate, 0.0) * _time_unit(site, shape)
                for site, rate in zip(structure.sites, structure.seconds_per_unit, strict=True)
            ],
            structure.output_scaling.predict(shape.batch_size, shape.sequence_length).tolist(),
            structure.owners,
            structure.value_scaling.predict(shape.batch_size, shape.sequence_length).tolist(),
            structure.savers,
        )

    def save(self, path: Path, fingerprint: str) -> None:
        """Write everything learnt to a JSON file (atomically). `fingerprint` says which model it belongs to."""
        kinds = {
            kind: {
                "sites": [vars(site) for site in s.sites],
                "parents": s.parents,
                "inputs": s.inputs,
                "owners": s.owners,
                "savers": s.savers,
                "element_bytes": s.value_scaling.element_bytes,
                "seconds_per_unit": s.seconds_per_unit,
                "samples": s.samples,
                "rows_per_token": s.rows_per_token,
            }
            for kind, s in self._structures.items()
        }
        text = json.dumps({"format": _FORMAT, "fingerprint": fingerprint, "kinds": kinds})
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> Profile:
        """Read a file written by `save`.

        Raises:
            ValueError: not such a file, or of another model.
        """
        try:
            data = json.loads(path.read_text())
            is_ours = data["format"] == _FORMAT
        except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"seed_profile={str(path)!r} is not a FlexTrainer profile ({error}); delete it") from error
        if not is_ours or data["fingerprint"] != fingerprint:
            raise ValueError(
                f"seed_profile={str(path)!r} belongs to another model or version ({data.get('fingerprint')!r}, this run is "
                f"{fingerprint!r}); give another path, or delete the file to have it measured again"
            )
        profile = cls()
        for kind, d in data["kinds"].items():
            structure = _Structure(
                sites=[Site(**site) for site in d["sites"]],
                parents=d["parents"],
                inputs=d["inputs"],
                owners=d["owners"],
                savers=d["savers"],
                value_scaling=Scaling(d["element_bytes"]),
                output_scaling=Scaling([1] * len(d["sites"])),
                seconds_per_unit=d["seconds_per_unit"],
                samples=d["samples"],
                rows_per_token=d["rows_per_token"],
            )
            for sample in structure.samples:
                structure.value_scaling.observe(sample["batch"], sample["sequence"], sample["values"])
                structure.output_scaling.observe(sample["batch"], sample["sequence"], sample["outputs"])
            profile._structures[kind] = structure
        return profile


def _structure_of(trace: Trace) -> _Structure:
    return _Structure(
        sites=[call.site for call in trace.calls],
        parents=[call.parent for call in trace.calls],
        inputs=[list(dict.fromkeys(call.inputs)) for call in trace.calls],
        owners=[value.owner for value in trace.values],
        savers=[list(value.savers) for value in trace.values],
        value_scaling=Scaling([value.element_bytes for value in trace.values]),
        output_scaling=Scaling([1] * len(trace.calls)),
        seconds_per_unit=[-1.0] * len(trace.calls),
    )


def _same_structure(structure: _Structure, trace: Trace) -> bool:
    return (
        structure.sites == [call.site for call in trace.calls]
        and structure.owners == [value.owner for value in trace.values]
        and structure.savers == [value.savers for value in trace.values]
    )


def _time_unit(site: Site, shape: BatchShape) -> float:
    return shape.num_tokens * (shape.sequence_length if site.kind in _QUADRATIC_KINDS else 1)
