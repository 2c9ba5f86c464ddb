"""A sequence of calls and values of which only sizes and times vary from batch to batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flex_trainer.activations.trace import Trace
from flex_trainer.cost.cut import CallNode, Cut, Sizes, ValueNode
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.load import Load, follows
from flex_trainer.cost.scaling import Scaling
from flex_trainer.cost.shape import BatchShape
from flex_trainer.cost.transients import TransientScaling
from flex_trainer.strategy import Site

_SMOOTHING = 0.3
_QUADRATIC_KINDS = frozenset({"attention_core"})
_MAX_SAMPLES = 64
_MAX_SEEN = 4096
_MAX_DEMANDS = 64
_OBSERVED_FIRST, _OBSERVED_EVERY = 3, 16
"""Real micro-batches that are looked at although they seem to be as expected: the first ones, and every so many."""


class Structure:
    """What is known of one such sequence; it grows with every trace of it."""

    def __init__(self, calls: tuple[CallNode, ...], values: tuple[ValueNode, ...]) -> None:
        self._calls = calls
        self._values = values
        self._value_scaling = Scaling([value.element_bytes for value in values])
        self._row_scaling = Scaling([1] * len(values))
        self._output_scaling = Scaling([1] * len(calls))
        self._forward_transients = TransientScaling()
        self._backward_transients = TransientScaling()
        self._gradient_bytes = np.zeros(len(calls), dtype=np.int64)
        self._seconds_per_unit = np.zeros(len(calls))
        quadratic = [call.site.kind in _QUADRATIC_KINDS for call in calls]
        self._is_quadratic = np.array(quadratic, dtype=bool)
        self._is_leaf = np.ones(len(calls))  # 0.0: made of others
        self._is_leaf[[call.parent for call in calls if call.parent >= 0]] = 0.0
        self._is_saved = np.array([bool(value.savers) for value in values], dtype=bool)
        owners = [calls[value.owner].site if value.owner >= 0 else None for value in values]
        self._layer_of = np.array([-1 if site is None else site.layer for site in owners], dtype=np.int64)
        self._follows = np.array(["" if site is None else follows(site.kind) or "" for site in owners])
        self._is_timed = False  # by a real run
        self._has_infinity = np.zeros(len(values), dtype=bool)  # as a mask: kept where others are quantized
        self._samples: list[dict[str, Any]] = []  # sizes that taught something, for the file
        self._sites = [call.site for call in calls]
        self._num_recomputable = sum(site.is_recomputable for site in self._sites)
        self._owners_and_savers = [value.owner for value in values], [list(value.savers) for value in values]
        self._cut: Cut | None = None
        self._demands: dict[tuple[int, int], tuple[float, dict[int, tuple[float, float]]]] = {}
        self._num_real = 0
        self.seen: dict[tuple[int, int], None] = {}
        """Shapes (batch size, sequence length) that had this structure, the latest last."""
        self.pairs_per_token: dict[str, float] = {}
        """Of each experts block: most seen."""

    @classmethod
    def of(cls, trace: Trace) -> Structure:
        return cls(
            tuple(CallNode(call.site, call.parent, tuple(dict.fromkeys(call.inputs))) for call in trace.calls),
            tuple(
                ValueNode(value.owner, tuple(value.savers), value.element_bytes, value.is_decision)
                for value in trace.values
            ),
        )

    def is_of(self, trace: Trace) -> bool:
        """Whether the trace has this structure."""
        sites = [call.site for call in trace.calls]
        if (len(sites), len(trace.values)) != (len(self._calls), len(self._values)) or sites != self._sites:
            return False
        self._sites = sites  # the same objects are soon found equal
        owners, savers = self._owners_and_savers
        return owners == [one.owner for one in trace.values] and savers == [list(one.savers) for one in trace.values]

    @property
    def is_traced(self) -> bool:
        """Whether a trace on shapes has told what it is like."""
        return not self._forward_transients.is_empty

    @property
    def longest(self) -> int:
        """The longest sequence seen."""
        return max((length for _, length in self.seen), default=0)

    def forward_seconds(self, shape: BatchShape) -> float:
        """Forward time of all operators that are not made of others."""
        return float(self._seconds(shape) @ self._is_leaf)

    def is_sure(self, shape: BatchShape) -> bool:
        """Whether sizes at this shape can be told, not only bounded."""
        return self._value_scaling.is_sure(shape.batch_size, shape.sequence_length)

    def is_due(self, num_traced: tuple[int, int, int]) -> bool:
        """Whether a real micro-batch that seems to be as expected is to be looked at all the same: another number of
        operators, of values or of operators that may be recomputed, one of the first, or one of every few. It counts as
        one more."""
        self._num_real += 1
        return (
            num_traced != (len(self._calls), len(self._values), self._num_recomputable)
            or self._num_real <= _OBSERVED_FIRST
            or self._num_real % _OBSERVED_EVERY == 0
        )

    def note(self, shape: BatchShape) -> None:
        """A micro-batch of this shape had this structure."""
        at = shape.batch_size, shape.sequence_length
        self.seen.pop(at, None)
        if len(self.seen) >= _MAX_SEEN:
            del self.seen[next(iter(self.seen))]
        self.seen[at] = None

    def observe(self, shape: BatchShape, trace: Trace, routed_pairs: Mapping[str, int]) -> bool:
        """Learn from one forward. Returns whether sizes were not as predicted."""
        sample: dict[str, Any] = {
            "at": [shape.batch_size, shape.sequence_length],
            "values": [value.num_bytes for value in trace.values],
            "outputs": [call.output_bytes for call in trace.calls],
        }
        if trace.is_symbolic:
            _ = self.cut
            works = [call.work for call in trace.calls if call.work is not None]
            sample["forward"] = [work.forward_transient_bytes for work in works]
            sample["backward"] = [work.backward_transient_bytes for work in works]
            sample["gradients"] = [work.gradient_bytes for work in works]
        is_news = trace.is_symbolic or not self._expects(sample)
        if is_news:
            sample["rows"] = [value.num_rows for value in trace.values]
            self._learn(sample)
        is_news |= self._learn_infinities(trace)
        self.note(shape)
        self.learn_pairs(shape, routed_pairs)
        self._time(shape, trace)
        return is_news

    def demand_bytes(self, shape: BatchShape, loads: Mapping[int, Load]) -> float:
        """What autograd saves in a micro-batch of this shape, under loads on the experts of layers (absent: even)."""
        at = shape.batch_size, shape.sequence_length
        found = self._demands.get(at)
        if found is None:
            found = self._demand(self._value_scaling.predict(*at))
            if len(self._demands) >= _MAX_DEMANDS:
                del self._demands[next(iter(self._demands))]
            self._demands[at] = found
        even_bytes, by_layer = found
        return even_bytes + sum(
            pairs_bytes * (load.pairs - 1) + rows_bytes * (load.rows - 1)
            for layer, load in loads.items()
            for pairs_bytes, rows_bytes in [by_layer.get(layer, (0.0, 0.0))]
        )

    def _demand(self, value_bytes: np.ndarray) -> tuple[float, dict[int, tuple[float, float]]]:
        """Bytes under an even load, and by layer those that follow the load's pairs, and its rows."""
        saved_bytes = value_bytes * self._is_saved
        even_bytes = float(saved_bytes.sum())
        varying_bytes = saved_bytes * ~self._value_scaling.is_constant()
        at, num_layers = self._layer_of + 1, int(self._layer_of.max(initial=-1)) + 2
        by_layer = [
            np.bincount(at, weights=varying_bytes * (self._follows == by), minlength=num_layers).tolist()
            for by in ("pairs", "rows")
        ]
        return even_bytes, dict(enumerate(zip(*by_layer, strict=True), start=-1))

    def learn_pairs(self, shape: BatchShape, routed_pairs: Mapping[str, int]) -> None:
        """Remember the most (token, expert) pairs per token that each experts block got."""
        num_tokens = max(shape.num_tokens, 1)
        for experts, num_pairs in routed_pairs.items():
            rate = num_pairs / num_tokens
            if rate > self.pairs_per_token.get(experts, 0.0):
                self.pairs_per_token[experts] = rate

    def forget(self, at: tuple[int, int]) -> None:
        """This shape has another structure now."""
        self.seen.pop(at, None)
        self._samples = [sample for sample in self._samples if tuple(sample["at"]) != at]

    @property
    def cut(self) -> Cut:
        """Its segments; worked out when it was traced, or else when first asked for."""
        if self._cut is None:
            self._cut = Cut(self._calls, self._values)
        return self._cut

    def graph(self, shape: BatchShape) -> ActivationGraph:
        """The activation graph of a micro-batch of this shape."""
        at = shape.batch_size, shape.sequence_length
        sizes = Sizes(
            seconds=self._seconds(shape),
            output_bytes=self._output_scaling.predict(*at),
            forward_transient_bytes=self._forward_transients.predict(shape.num_tokens) if self.is_traced else None,
            backward_transient_bytes=self._backward_transients.predict(shape.num_tokens) if self.is_traced else None,
            gradient_bytes=self._gradient_bytes,
            value_bytes=self._value_scaling.predict(*at),
            value_rows=np.where(self._has_infinity, 0, self._row_scaling.predict(*at)),
            is_routed=(self._follows != "") & ~self._value_scaling.is_constant(),
        )
        return self.cut.graph(sizes)

    def _seconds(self, shape: BatchShape) -> np.ndarray:
        """Forward time of every call."""
        return self._seconds_per_unit * self._time_units(shape)

    def _time_units(self, shape: BatchShape) -> np.ndarray:
        """By call: what its time is in proportion to."""
        num_tokens = shape.num_tokens
        return np.where(self._is_quadratic, num_tokens * shape.sequence_length, num_tokens)

    def to_mapping(self) -> dict[str, Any]:
        """Everything learnt, as JSON can hold it."""
        return {
            "calls": [{**vars(call), "site": vars(call.site)} for call in self._calls],
            "values": [vars(value) for value in self._values],
            "seconds_per_unit": self._seconds_per_unit.tolist(),
            "is_timed": self._is_timed,
            "has_infinity": self._has_infinity.tolist() if self.is_traced else [False] * len(self._values),
            "samples": self._samples,
            "seen": list(self.seen),
            "pairs_per_token": self.pairs_per_token,
        }

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Structure:
        """From what `to_mapping` gave, checked: lists that belong together are equally long.

        Raises:
            KeyError, TypeError, ValueError: not such a mapping.
        """
        structure = cls(
            tuple(
                CallNode(Site(**call["site"]), int(call["parent"]), tuple(map(int, call["inputs"])))
                for call in data["calls"]
            ),
            tuple(
                ValueNode(
                    int(value["owner"]),
                    tuple(map(int, value["savers"])),
                    int(value["element_bytes"]),
                    bool(value.get("is_decision", False)),
                )
                for value in data["values"]
            ),
        )
        structure._seconds_per_unit = np.array([float(seconds) for seconds in data["seconds_per_unit"]])
        structure._is_timed = bool(data["is_timed"])
        structure._has_infinity = np.array([bool(has_infinity) for has_infinity in data["has_infinity"]], dtype=bool)
        structure.seen = {(int(batch_size), int(length)): None for batch_size, length in data["seen"]}
        structure.pairs_per_token = {name: float(rate) for name, rate in data["pairs_per_token"].items()}
        by_call: list[Any] = [data["seconds_per_unit"]]
        by_value: list[Any] = [data["has_infinity"]]
        for sample in data["samples"]:
            by_call += [sample[key] for key in ("outputs", "forward", "backward", "gradients") if key in sample]
            by_value += [sample["values"], sample["rows"]]
        num_calls, num_values = len(structure._calls), len(structure._values)
        if any(len(part) != num_calls for part in by_call) or any(len(part) != num_values for part in by_value):
            raise ValueError("lists that belong together differ in length")
        for sample in data["samples"]:
            structure._learn(sample)
        return structure

    def _learn(self, sample: dict[str, Any]) -> None:
        batch_size, sequence_length = sample["at"]
        self._samples.append(sample)
        self._demands.clear()
        self._value_scaling.observe(batch_size, sequence_length, sample["values"])
        self._row_scaling.observe(batch_size, sequence_length, sample["rows"])
        self._output_scaling.observe(batch_size, sequence_length, sample["outputs"])
        if "forward" in sample:
            self._forward_transients.observe(batch_size * sequence_length, sample["forward"])
            self._backward_transients.observe(batch_size * sequence_length, sample["backward"])
            self._gradient_bytes = np.array(sample["gradients"], dtype=np.int64)
        if len(self._samples) > _MAX_SAMPLES:
            # The file is a hint, and scaling has eliminated what these samples could: the first (traced) and the latest
            # ones stay.
            del self._samples[_MAX_SAMPLES // 2]

    def _learn_infinities(self, trace: Trace) -> bool:
        """A trace on shapes follows where infinities are written. In a real run they may be an accident, so that counts
        only where there is no such trace. Returns whether there was news."""
        if self.is_traced and not trace.is_symbolic:
            return False
        has_infinity = self._has_infinity | np.array([value.has_infinity for value in trace.values], dtype=bool)
        is_news = bool((has_infinity != self._has_infinity).any())
        self._has_infinity = has_infinity
        return is_news

    def _expects(self, sample: Mapping[str, Any]) -> bool:
        """Whether these sizes teach nothing: just as predicted, or, at a shape seen before, no larger."""
        batch_size, sequence_length = sample["at"]
        if not self._samples or not self._value_scaling.is_sure(batch_size, sequence_length):
            return False
        predicted = (
            self._value_scaling.predict(batch_size, sequence_length),
            self._output_scaling.predict(batch_size, sequence_length),
        )
        actual = np.array(sample["values"], dtype=np.int64), np.array(sample["outputs"], dtype=np.int64)
        is_known = (batch_size, sequence_length) in self.seen
        return all(
            bool((now <= expected).all() if is_known else (now == expected).all())
            for expected, now in zip(predicted, actual, strict=True)
        )

    def _time(self, shape: BatchShape, trace: Trace) -> None:
        """Estimates count until the first real run; from then on only real ones do."""
        if trace.is_symbolic and self._is_timed:
            return
        is_first = not trace.is_symbolic and not self._is_timed
        self._is_timed = not trace.is_symbolic
        rates = np.array([call.seconds for call in trace.calls]) / np.maximum(self._time_units(shape), 1)
        is_replaced = is_first or trace.is_symbolic
        self._seconds_per_unit = (
            rates if is_replaced else self._seconds_per_unit + _SMOOTHING * (rates - self._seconds_per_unit)
        )
