"""What is known of a model's operators: sizes by shape, times per token. Filled from traces, readable from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flex_trainer.activations.trace import Trace
from flex_trainer.cost.graph import ActivationGraph, cut_into_segments
from flex_trainer.cost.scaling import Scaling
from flex_trainer.errors import UserError
from flex_trainer.files import write_whole
from flex_trainer.strategy import Site

_SMOOTHING = 0.3
_QUADRATIC_KINDS = frozenset({"attention_core"})
_FORMAT = 2


@dataclass(frozen=True)
class BatchShape:
    """What the sizes of a micro-batch's activations depend on."""

    batch_size: int
    sequence_length: int
    kind: str = ""
    """Which inputs there are, whether there is padding, dtype and autocast: what may change the operators themselves.
    """

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
    samples: list[dict[str, Any]] = field(default_factory=list)  # sizes that taught something, for the file
    seen: set[tuple[int, int]] = field(default_factory=set)  # all shapes
    rows_per_token: dict[str, float] = field(default_factory=dict)  # of each experts block: most seen

    def expects(self, at: tuple[int, int], value_bytes: list[int], output_bytes: list[int]) -> bool:
        """Whether sizes at this shape teach nothing: just as predicted, or, at a shape seen before, no larger."""
        if not self.samples or not self.value_scaling.is_sure(*at):
            return False
        predicted = self.value_scaling.predict(*at).tolist(), self.output_scaling.predict(*at).tolist()
        pairs = [*zip(predicted[0], value_bytes, strict=True), *zip(predicted[1], output_bytes, strict=True)]
        if at in self.seen:
            return all(actual <= expected for expected, actual in pairs)
        return all(actual == expected for expected, actual in pairs)


class Profile:
    """Learns from the traces of micro-batches that were followed by backward.

    A kind of batch may have several structures: some models run another sequence of operators when the sequence is
    longer (chunked linear attention) or the batch has one row only. Each shape belongs to the structure it was last
    seen with.
    """

    def __init__(self) -> None:
        self._structures: dict[str, list[_Structure]] = {}  # by the kind of batch
        self.transient_factor: float | None = None
        """What transients really were, over what the cost model says; None: never measured."""
        self.version = 0
        """Grows when anything but a time changed: plans made before may be wrong."""

    def knows(self, shape: BatchShape) -> bool:
        """Whether sizes at this shape can be told, not only bounded: mostly after two or three shapes of a kind."""
        structure = self._structure(shape)
        return structure is not None and structure.value_scaling.is_sure(shape.batch_size, shape.sequence_length)

    def rows(self, shape: BatchShape, experts: str) -> int | None:
        """Rows that the block called `experts` was planned to get in a micro-batch of this shape."""
        structure = self._structure(shape)
        rate = None if structure is None else structure.rows_per_token.get(experts)
        return None if rate is None else round(rate * shape.num_tokens)

    def observe(self, shape: BatchShape, trace: Trace, routed_rows: Mapping[str, int]) -> None:
        """Learn sizes and times from one forward; `routed_rows`: rows that each experts block got."""
        structure = self._structure_for(shape, trace)
        value_bytes = [value.num_bytes for value in trace.values]
        output_bytes = [call.output_bytes for call in trace.calls]
        at = (shape.batch_size, shape.sequence_length)
        if not structure.expects(at, value_bytes, output_bytes):
            self.version += 1
            structure.samples.append({"at": at, "values": value_bytes, "outputs": output_bytes})
            structure.value_scaling.observe(*at, value_bytes)
            structure.output_scaling.observe(*at, output_bytes)
        structure.seen.add(at)
        for experts, num_rows in routed_rows.items():
            rate = num_rows / max(shape.num_tokens, 1)
            structure.rows_per_token[experts] = max(rate, structure.rows_per_token.get(experts, 0.0))
        for index, call in enumerate(trace.calls):
            rate = call.seconds / _time_unit(call.site, shape)
            old = structure.seconds_per_unit[index]
            structure.seconds_per_unit[index] = rate if old < 0 else old + _SMOOTHING * (rate - old)

    def _structure(self, shape: BatchShape) -> _Structure | None:
        """The structure that a micro-batch of this shape is expected to have."""
        known = self._structures.get(_key(shape), [])
        at = (shape.batch_size, shape.sequence_length)
        for structure in known:
            if at in structure.seen:
                return structure
        if len(known) <= 1:
            return known[0] if known else None
        # The one of the next longer sequences seen: it holds no less. None when this one is longer than all.
        lengths = [
            (length, number)
            for number, structure in enumerate(known)
            for _, length in structure.seen
            if length >= shape.sequence_length
        ]
        return known[min(lengths)[1]] if lengths else None

    def _structure_for(self, shape: BatchShape, trace: Trace) -> _Structure:
        """The structure of this trace, new if need be. The shape leaves any other structure that had it."""
        known = self._structures.setdefault(_key(shape), [])
        at = (shape.batch_size, shape.sequence_length)
        found = next((structure for structure in known if _same_structure(structure, trace)), None)
        for structure in known:
            if structure is not found and at in structure.seen:
                structure.seen.remove(at)
                structure.samples = [sample for sample in structure.samples if tuple(sample["at"]) != at]
                self.version += 1
        if found is None:
            found = _structure_of(trace)
            known.append(found)
            self.version += 1
        known[:] = [structure for structure in known if structure.seen or structure is found]
        return found

    def graph(self, shape: BatchShape) -> ActivationGraph:
        """The activation graph of a micro-batch of this shape."""
        structure = self._structure(shape)
        assert structure is not None, "graph comes after knows"
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
            structure.value_scaling.element_bytes,
        )

    def save(self, path: Path, fingerprint: str) -> None:
        """Write everything learnt to a JSON file (whole or not at all). `fingerprint` says which model it belongs to.

        Raises:
            ValueError: the file cannot be written.
        """
        structures = [
            {
                "key": key,
                "sites": [vars(site) for site in s.sites],
                "parents": s.parents,
                "inputs": s.inputs,
                "owners": s.owners,
                "savers": s.savers,
                "element_bytes": s.value_scaling.element_bytes,
                "seconds_per_unit": s.seconds_per_unit,
                "samples": s.samples,
                "seen": sorted(s.seen),
                "rows_per_token": s.rows_per_token,
            }
            for key, known in self._structures.items()
            for s in known
        ]
        facts = {"format": _FORMAT, "fingerprint": fingerprint, "transient_factor": self.transient_factor}
        text = json.dumps({**facts, "structures": structures})
        write_whole(path, text, what="the seed profile")

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> Profile:
        """Read a file written by `save`.

        Raises:
            ValueError: not such a file, one that cannot be read, or one of another model.
        """
        profile = cls()
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            of_model = data["fingerprint"]
            is_ours = data["format"] == _FORMAT and of_model == fingerprint
            profile.transient_factor = float(data["transient_factor"]) if is_ours and data["transient_factor"] else None
            for d in data["structures"] if is_ours else ():
                profile._structures.setdefault(d["key"], []).append(_structure_from(d))
        except (OSError, KeyError, TypeError, IndexError, ValueError) as error:  # also broken text and broken JSON
            raise UserError(
                f"seed_profile={str(path)!r} is not a FlexTrainer profile ({type(error).__name__}: {error}); delete "
                "it, or give another path"
            ) from error
        if not is_ours:
            raise UserError(
                f"seed_profile={str(path)!r} belongs to another model or version ({of_model!r}, this run is "
                f"{fingerprint!r}); give another path, or delete the file to have it measured again"
            )
        return profile


def _key(shape: BatchShape) -> str:
    """Batches of one row run other operators in some models (what is expanded over rows is then no copy)."""
    return f"{shape.kind} rows={'1' if shape.batch_size == 1 else 'n'}"


def _structure_from(d: Mapping[str, Any]) -> _Structure:
    """From the file's form, checked: lists that belong together are equally long."""
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
        seen={(batch_size, length) for batch_size, length in d["seen"]},
        rows_per_token=d["rows_per_token"],
    )
    num_calls, num_values = len(structure.sites), len(structure.owners)
    by_call = [structure.parents, structure.inputs, structure.seconds_per_unit]
    by_value = [structure.savers, structure.value_scaling.element_bytes]
    by_call += [sample["outputs"] for sample in structure.samples]
    by_value += [sample["values"] for sample in structure.samples]
    if any(len(part) != num_calls for part in by_call) or any(len(part) != num_values for part in by_value):
        raise ValueError("lists that belong together differ in length")
    for sample in structure.samples:
        batch_size, sequence_length = sample["at"]
        structure.value_scaling.observe(batch_size, sequence_length, sample["values"])
        structure.output_scaling.observe(batch_size, sequence_length, sample["outputs"])
    return structure


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
