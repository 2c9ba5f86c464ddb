"""What is known of a model's operators: sizes by shape, times per token. Filled from traces, readable from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from flex_trainer.activations.trace import Trace
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.load import Load
from flex_trainer.cost.shape import BatchShape
from flex_trainer.cost.structure import Structure
from flex_trainer.errors import UserError
from flex_trainer.files import write_whole

_FORMAT = 4
_MUCH_LONGER = 2.0
_MAX_KINDS = 64
"""Kinds of batches that are remembered: what is trained may change again and again, into ever other kinds."""
_MAX_GRAPHS = 16
_ROUNDING_BYTES = 2.0
"""Per value: by so much sizes under a load may be off."""


class Profile:
    """Learns from the traces of micro-batches that were followed by backward.

    A kind of batch may have several structures: some models run another sequence of operators when the sequence is
    longer (chunked linear attention) or the batch has one row only. Each shape belongs to the structure it was last
    seen with.
    """

    def __init__(self) -> None:
        self._structures: dict[str, list[Structure]] = {}  # by the kind of batch
        self.transient_factor: float | None = None
        """What transients really were, over what the cost model says; None: never measured."""
        self.margin_bytes = 0
        """What is kept free since an allocation failed."""
        self.version = 0
        """Grows when anything but a time changed: plans made before may be wrong."""
        self._versions: dict[str, int] = {}  # the version in which something about a kind of batch changed last
        self._graphs: dict[BatchShape, ActivationGraph] = {}
        self._is_known: dict[BatchShape, tuple[Structure | None, bool]] = {}

    def knows(self, shape: BatchShape) -> bool:
        """Whether sizes at this shape can be told, not only bounded: mostly after two or three shapes of a kind."""
        return shape.is_told and self._lookup(shape)[1]

    def version_of(self, shape: BatchShape) -> int:
        """As `version`, for batches of this kind alone."""
        return self._versions.get(_key(shape), 0)

    def is_longer_than_any(self, shape: BatchShape) -> bool:
        """Whether the sequences are much longer than any seen of this kind: the model might do something else with
        them. Lengths that rise step by step would otherwise be traced at each step."""
        known = self._structures.get(_key(shape), [])
        return all(shape.sequence_length > _MUCH_LONGER * structure.longest for structure in known)

    def planned_pairs(self, shape: BatchShape) -> Mapping[str, int]:
        """(Token, expert) pairs that each experts block is planned to get in a micro-batch of this shape, by name."""
        structure = self._lookup(shape)[0]
        rates = {} if structure is None else structure.pairs_per_token
        return {experts: round(rate * shape.num_tokens) for experts, rate in rates.items()}

    def is_as_expected(
        self,
        shape: BatchShape,
        num_traced: tuple[int, int, int],
        demand_bytes: int,
        loads: Mapping[int, Load],
        routed_pairs: Mapping[str, int],
    ) -> bool:
        """Whether a real micro-batch need not be observed: it saved what was expected of it, and none of its kind has
        been skipped for long. Takes a fraction of what `observe` takes, and notes the shape and the pairs.

        Args:
            num_traced: operators that ran, values, and operators that may be recomputed.
            demand_bytes: what autograd saved, or would have saved had all been kept.
            loads: of the layers whose experts are on several ranks.
            routed_pairs: what each experts block got.
        """
        structure, is_known = self._lookup(shape)
        if structure is None or not is_known:
            return False
        difference = abs(structure.demand_bytes(shape, loads) - demand_bytes)
        if difference > (_ROUNDING_BYTES * num_traced[1] if loads else 0.5) or structure.is_due(num_traced):
            return False
        structure.note(shape)
        structure.learn_pairs(shape, routed_pairs)
        return True

    def forward_seconds(self, shape: BatchShape) -> float:
        """Forward time of the operators of a micro-batch of this shape; 0 where nothing is known."""
        structure = self._lookup(shape)[0]
        return 0.0 if structure is None else structure.forward_seconds(shape)

    def observe(self, shape: BatchShape, trace: Trace, routed_pairs: Mapping[str, int]) -> None:
        """Learn sizes and times from one forward, real or symbolic; `routed_pairs`: what each experts block got."""
        before = self.version
        is_news = self._structure_for(shape, trace).observe(shape, trace, routed_pairs)
        self.version += is_news
        if self.version != before:
            self._versions[_key(shape)] = self.version
        self._is_known.clear()
        if is_news:
            self._graphs.clear()

    def _lookup(self, shape: BatchShape) -> tuple[Structure | None, bool]:
        """The structure of a shape, and whether its sizes are sure; remembered until something is observed."""
        found = self._is_known.get(shape)
        if found is None:
            structure = self._structure(shape)
            found = self._is_known[shape] = structure, structure is not None and structure.is_sure(shape)
        return found

    def _structure(self, shape: BatchShape) -> Structure | None:
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

    def _structure_for(self, shape: BatchShape, trace: Trace) -> Structure:
        """The structure of this trace, new if need be. The shape leaves any other structure that had it."""
        known = self._structures[_key(shape)] = self._structures.pop(_key(shape), [])  # the newest comes last
        while len(self._structures) > _MAX_KINDS:
            del self._structures[next(iter(self._structures))]
        at = (shape.batch_size, shape.sequence_length)
        found = next((structure for structure in known if structure.is_of(trace)), None)
        for structure in known:
            if structure is not found and at in structure.seen:
                structure.forget(at)
                self._graphs.clear()
                self.version += 1
        if found is None:
            found = Structure.of(trace)
            known.append(found)
            self.version += 1
        known[:] = [structure for structure in known if structure.seen or structure is found]
        return found

    def graph(self, shape: BatchShape) -> ActivationGraph:
        """The activation graph of a micro-batch of this shape."""
        structure = self._lookup(shape)[0]
        assert structure is not None, "graph comes after knows"
        graph = structure.graph(shape)
        if shape not in self._graphs and len(self._graphs) >= _MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[shape] = graph
        return graph

    def sizes(self, shape: BatchShape) -> ActivationGraph:
        """The same graph, made anew only after sizes have changed: its times may be old."""
        found = self._graphs.get(shape)
        return self.graph(shape) if found is None else found

    def save(self, path: Path, fingerprint: str) -> None:
        """Write everything learnt to a JSON file (whole or not at all). `fingerprint` says which model it belongs to.

        Raises:
            ValueError: the file cannot be written.
        """
        structures = [
            {"key": key, **structure.to_mapping()} for key, known in self._structures.items() for structure in known
        ]
        facts = {
            "format": _FORMAT,
            "fingerprint": fingerprint,
            "transient_factor": self.transient_factor,
            "margin_bytes": self.margin_bytes,
        }
        text = json.dumps({**facts, "structures": structures})
        write_whole(path, text, what="the seed profile")

    @staticmethod
    def fingerprint_of(path: Path) -> str | None:
        """Which model a file belongs to; None: it does not say."""
        try:
            return json.loads(path.read_text(encoding="utf-8")).get("fingerprint")
        except (OSError, ValueError, AttributeError):
            return None

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
            profile.margin_bytes = int(data.get("margin_bytes", 0)) if is_ours else 0
            for d in data["structures"] if is_ours else ():
                profile._structures.setdefault(d["key"], []).append(Structure.from_mapping(d))
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
    return f"{shape.kind} padding={shape.has_padding} rows={'1' if shape.batch_size == 1 else 'n'}"
