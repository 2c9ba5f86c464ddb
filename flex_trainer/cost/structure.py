"""A sequence of calls and values of which only sizes and times vary from batch to batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flex_trainer.activations.trace import Trace
from flex_trainer.cost.graph import ActivationGraph, CallNode, Sizes, ValueNode, cut_into_segments
from flex_trainer.cost.load import follows
from flex_trainer.cost.scaling import Scaling
from flex_trainer.cost.shape import BatchShape
from flex_trainer.cost.transients import TransientScaling
from flex_trainer.strategy import Site

_SMOOTHING = 0.3
_QUADRATIC_KINDS = frozenset({"attention_core"})


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
        self._gradient_bytes = [0] * len(calls)
        self._seconds_per_unit = [0.0] * len(calls)
        self._is_timed = False  # by a real run
        self._has_infinity = [False] * len(values)  # as a mask: kept where others are quantised
        self._samples: list[dict[str, Any]] = []  # sizes that taught something, for the file
        self.seen: set[tuple[int, int]] = set()
        """All shapes (batch size, sequence length) that had this structure."""
        self.pairs_per_token: dict[str, float] = {}
        """Of each experts block: most seen."""

    @classmethod
    def of(cls, trace: Trace) -> Structure:
        return cls(
            tuple(CallNode(call.site, call.parent, tuple(dict.fromkeys(call.inputs))) for call in trace.calls),
            tuple(ValueNode(value.owner, tuple(value.savers), value.element_bytes) for value in trace.values),
        )

    def is_of(self, trace: Trace) -> bool:
        """Whether the trace has this structure."""
        return (
            len(self._calls) == len(trace.calls)
            and len(self._values) == len(trace.values)
            and all(node.site == call.site for node, call in zip(self._calls, trace.calls, strict=True))
            and all(
                node.owner == value.owner and node.savers == tuple(value.savers)
                for node, value in zip(self._values, trace.values, strict=True)
            )
        )

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
        blocks = {call.parent for call in self._calls}
        return sum(
            rate * _time_unit(call.site, shape)
            for index, (call, rate) in enumerate(zip(self._calls, self._seconds_per_unit, strict=True))
            if index not in blocks
        )

    def is_sure(self, shape: BatchShape) -> bool:
        """Whether sizes at this shape can be told, not only bounded."""
        return self._value_scaling.is_sure(shape.batch_size, shape.sequence_length)

    def observe(self, shape: BatchShape, trace: Trace, routed_pairs: Mapping[str, int]) -> bool:
        """Learn from one forward. Returns whether sizes were not as predicted."""
        sample: dict[str, Any] = {
            "at": [shape.batch_size, shape.sequence_length],
            "values": [value.num_bytes for value in trace.values],
            "rows": [value.num_rows for value in trace.values],
            "outputs": [call.output_bytes for call in trace.calls],
        }
        if trace.is_symbolic:
            works = [call.work for call in trace.calls if call.work is not None]
            sample["forward"] = [work.forward_transient_bytes for work in works]
            sample["backward"] = [work.backward_transient_bytes for work in works]
            sample["gradients"] = [work.gradient_bytes for work in works]
        is_news = trace.is_symbolic or not self._expects(sample)
        if is_news:
            self._learn(sample)
        is_news |= self._learn_infinities(trace)
        self.seen.add((shape.batch_size, shape.sequence_length))
        for experts, num_pairs in routed_pairs.items():
            rate = num_pairs / max(shape.num_tokens, 1)
            self.pairs_per_token[experts] = max(rate, self.pairs_per_token.get(experts, 0.0))
        self._time(shape, trace)
        return is_news

    def forget(self, at: tuple[int, int]) -> None:
        """This shape has another structure now."""
        self.seen.discard(at)
        self._samples = [sample for sample in self._samples if tuple(sample["at"]) != at]

    def graph(self, shape: BatchShape) -> ActivationGraph:
        """The activation graph of a micro-batch of this shape."""
        at = shape.batch_size, shape.sequence_length
        unknown = [None] * len(self._calls)
        is_constant = self._value_scaling.is_constant()
        sizes = Sizes(
            seconds=[
                rate * _time_unit(call.site, shape)
                for call, rate in zip(self._calls, self._seconds_per_unit, strict=True)
            ],
            output_bytes=self._output_scaling.predict(*at).tolist(),
            forward_transient_bytes=(
                unknown if not self.is_traced else self._forward_transients.predict(shape.num_tokens)
            ),
            backward_transient_bytes=(
                unknown if not self.is_traced else self._backward_transients.predict(shape.num_tokens)
            ),
            gradient_bytes=self._gradient_bytes,
            value_bytes=self._value_scaling.predict(*at).tolist(),
            value_rows=[
                0 if is_kept else num_rows
                for is_kept, num_rows in zip(self._has_infinity, self._row_scaling.predict(*at).tolist(), strict=True)
            ],
            is_routed=[
                value.owner >= 0 and follows(self._calls[value.owner].site.kind) is not None and not constant
                for value, constant in zip(self._values, is_constant.tolist(), strict=True)
            ],
        )
        return cut_into_segments(self._calls, self._values, sizes)

    def to_mapping(self) -> dict[str, Any]:
        """Everything learnt, as JSON can hold it."""
        return {
            "calls": [{**vars(call), "site": vars(call.site)} for call in self._calls],
            "values": [vars(value) for value in self._values],
            "seconds_per_unit": self._seconds_per_unit,
            "is_timed": self._is_timed,
            "has_infinity": self._has_infinity if self.is_traced else [False] * len(self._values),
            "samples": self._samples,
            "seen": sorted(self.seen),
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
                ValueNode(int(value["owner"]), tuple(map(int, value["savers"])), int(value["element_bytes"]))
                for value in data["values"]
            ),
        )
        structure._seconds_per_unit = [float(seconds) for seconds in data["seconds_per_unit"]]
        structure._is_timed = bool(data["is_timed"])
        structure._has_infinity = [bool(has_infinity) for has_infinity in data["has_infinity"]]
        structure.seen = {(int(batch_size), int(length)) for batch_size, length in data["seen"]}
        structure.pairs_per_token = {name: float(rate) for name, rate in data["pairs_per_token"].items()}
        by_call: list[list[Any]] = [structure._seconds_per_unit]
        by_value: list[list[Any]] = [structure._has_infinity]
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
        self._value_scaling.observe(batch_size, sequence_length, sample["values"])
        self._row_scaling.observe(batch_size, sequence_length, sample["rows"])
        self._output_scaling.observe(batch_size, sequence_length, sample["outputs"])
        if "forward" in sample:
            self._forward_transients.observe(batch_size * sequence_length, sample["forward"])
            self._backward_transients.observe(batch_size * sequence_length, sample["backward"])
            self._gradient_bytes = sample["gradients"]

    def _learn_infinities(self, trace: Trace) -> bool:
        """A trace on shapes follows where infinities are written. In a real run they may be an accident, so that counts
        only where there is no such trace. Returns whether there was news."""
        if self.is_traced and not trace.is_symbolic:
            return False
        pairs = zip(self._has_infinity, trace.values, strict=True)
        has_infinity = [known or value.has_infinity for known, value in pairs]
        is_news = has_infinity != self._has_infinity
        self._has_infinity = has_infinity
        return is_news

    def _expects(self, sample: Mapping[str, Any]) -> bool:
        """Whether these sizes teach nothing: just as predicted, or, at a shape seen before, no larger."""
        batch_size, sequence_length = sample["at"]
        if not self._samples or not self._value_scaling.is_sure(batch_size, sequence_length):
            return False
        predicted = (
            self._value_scaling.predict(batch_size, sequence_length).tolist(),
            self._output_scaling.predict(batch_size, sequence_length).tolist(),
        )
        pairs = [
            *zip(predicted[0], sample["values"], strict=True),
            *zip(predicted[1], sample["outputs"], strict=True),
        ]
        if (batch_size, sequence_length) in self.seen:
            return all(actual <= expected for expected, actual in pairs)
        return all(actual == expected for expected, actual in pairs)

    def _time(self, shape: BatchShape, trace: Trace) -> None:
        """Estimates count until the first real run; from then on only real ones do."""
        if trace.is_symbolic and self._is_timed:
            return
        is_first = not trace.is_symbolic and not self._is_timed
        self._is_timed = not trace.is_symbolic
        for index, call in enumerate(trace.calls):
            rate = call.seconds / max(_time_unit(call.site, shape), 1)
            old = self._seconds_per_unit[index]
            self._seconds_per_unit[index] = rate if is_first or trace.is_symbolic else old + _SMOOTHING * (rate - old)


def _time_unit(site: Site, shape: BatchShape) -> float:
    return shape.num_tokens * (shape.sequence_length if site.kind in _QUADRATIC_KINDS else 1)
