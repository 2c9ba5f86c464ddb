"""The micro-batches in flight: between the begin of their forward and the end of their backward, in any part.

    forward begins    `beginning`, `add`             another one that waits is put down: what is to come is not its own
    forward ends      `end_forward`                  what is held goes into the books
    backward begins   `backward_begins`              the first value is asked for (or a schedule says so: `backward`)
    backward ends     `_backward_ended`              autograd says so; "begun" is not "ended"
    it is over        `settle`                       its values are gone, or it was ended explicitly: learn, forget

A forward may begin while a backward is half way. Events may come from autograd's threads, so each holds the lock.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from flex_trainer.activations.context import current_scope
from flex_trainer.activations.place import Latest
from flex_trainer.compat import keeps_graph, when_backward_ends
from flex_trainer.errors import UserError
from flex_trainer.provision.activity import Activity
from flex_trainer.provision.device_books import DeviceBooks
from flex_trainer.provision.micro_batch import MicroBatch
from flex_trainer.provision.part import ModelPart


class Flight:
    """All micro-batches in flight on a device.

    Args:
        parts: the parts of the model, by name; looked at whenever needed.
        latest: which micro-batch ran last, and where it is.
        ended: called with each micro-batch whose backward has ended, when its part has learnt from it.
    """

    def __init__(self, parts: Mapping[str, ModelPart], latest: Latest, ended: Callable[[MicroBatch], None]) -> None:
        self.books: DeviceBooks | None = None
        """Of the device; before anything begins."""
        self.micro_batches: list[MicroBatch] = []
        """In the order of their forwards."""
        self._parts = parts
        self._latest = latest
        self._ended = ended
        self._num_contexts = 0  # `backward` contexts that are open
        self._lock = threading.RLock()

    @property
    def _device(self) -> DeviceBooks:
        assert self.books is not None, "after attach"
        return self.books

    def found(self, part: str, number: int) -> MicroBatch | None:
        return next((one for one in self.micro_batches if one.key == (part, number)), None)

    def running(self) -> MicroBatch | None:
        """The one that is in forward on this thread."""
        scope = current_scope()
        return next((one for one in self.micro_batches if scope is not None and one.scope is scope), None)

    def open_forward(self, part: str) -> MicroBatch | None:
        """The one whose forward has begun in a part, and not ended."""
        return next((one for one in self.micro_batches if one.part == part and not one.is_forward_done), None)

    # Forward

    @contextmanager
    def beginning(self, part: ModelPart) -> Iterator[Activity]:
        """Around the begin of a forward: gives the activity of the micro-batch that is planned and added inside."""
        activity, activities = Activity(self._device.device), self._device.activities
        with self._lock:
            waiting = [one for one in self.micro_batches if not one.backwards]
            for one in waiting:
                activities.put_down(one.activity)
            activities.take_up(activity)
            try:
                if part.managed.units is not None and any(one.part == part.name for one in self.micro_batches):
                    part.managed.units.keep_whole(True)
                yield activity
            except BaseException:
                activities.put_down(activity)
                self._device.offloading.settle()
                raise
            for one in waiting:
                one.is_covered = True

    def add(self, micro_batch: MicroBatch) -> None:
        self.micro_batches.append(micro_batch)

    def end_forward(self, micro_batch: MicroBatch) -> None:
        """The bytes really held go into the books."""
        micro_batch.end_forward()
        if self._device.activities.is_at_work(micro_batch.activity):
            micro_batch.forward_peak = self._device.activities.turn(micro_batch.activity)
        self._parts[micro_batch.part].commit(micro_batch)

    def _end_open_forwards(self) -> None:
        """Of a model entered by another door than its forward, forward has ended when something else begins."""
        for micro_batch in self.micro_batches:
            if not micro_batch.is_forward_done and micro_batch.entered is not None:
                self.end_forward(micro_batch)

    # Backward

    @contextmanager
    def backward(self, part: str, number: int | None, *, is_last: bool) -> Iterator[None]:
        """See `FlexRuntime.backward`."""
        activities = self._device.activities if self.books is not None else None
        self._end_open_forwards()
        named = None if number is None else self.found(part, number)
        if number is not None and named is None:
            raise UserError(f"no micro-batch {number} of part {part!r} is in flight")
        if named is not None:
            self._take_up_backward(named)
        self._num_contexts += 1
        try:
            yield
        except BaseException:
            self.forget([one for one in self.micro_batches if one.has_backward_begun and named in (None, one)])
            if activities is not None:
                activities.put_down_all()
            raise
        finally:
            self._num_contexts -= 1
        self._latest.whereabouts.at = None
        with self._lock:
            for one in list(self.micro_batches):
                if not one.has_backward_begun or one.backwards or named not in (None, one):
                    continue
                self._device.activities.put_down(one.activity)
                if is_last and (named is one or not one.keeps_graph):
                    self._finish(one)
            self.settle()

    def backward_begins(self, micro_batch: MicroBatch, number: int) -> None:
        """A backward has asked for a value of a micro-batch for the first time."""
        with self._lock:
            if number < 0 or number in micro_batch.backwards or micro_batch not in self.micro_batches:
                return
            if not micro_batch.is_forward_done:
                if micro_batch.entered is None:
                    return  # a forward that takes gradients
                self.end_forward(micro_batch)
            self._latest.whereabouts = micro_batch.whereabouts
            self._take_up_backward(micro_batch)
            micro_batch.backwards.add(number)
            micro_batch.keeps_graph = keeps_graph()
            when_backward_ends(functools.partial(self._backward_ended, micro_batch, number))

    def _take_up_backward(self, micro_batch: MicroBatch) -> None:
        activities = self._device.activities
        if not activities.is_at_work(micro_batch.activity):
            micro_batch.backward_base_bytes = self._device.meter.in_use_bytes()
            activities.take_up(micro_batch.activity)
        elif not micro_batch.has_backward_begun:
            micro_batch.loss_peak = activities.turn(micro_batch.activity)
        micro_batch.activity.stopwatch.start()
        micro_batch.has_backward_begun = True

    def _backward_ended(self, micro_batch: MicroBatch, number: int) -> None:
        """Called by autograd. A `backward` context ends later, when gradients are where they belong."""
        with self._lock:
            micro_batch.backwards.discard(number)
            if self._num_contexts == 0 and not micro_batch.backwards:
                self._device.activities.put_down(micro_batch.activity)

    # The end

    def settle(self) -> None:
        """End the micro-batches whose backward is over, and drop those for which none will come."""
        with self._lock:
            self._end_open_forwards()
            for micro_batch in [one for one in self.micro_batches if one.is_over]:
                self._finish(micro_batch)
            self.forget([one for one in self.micro_batches if one.is_abandoned])

    def _finish(self, micro_batch: MicroBatch) -> None:
        self._device.activities.put_down(micro_batch.activity)
        self.micro_batches.remove(micro_batch)
        self._let_units_go()
        self._parts[micro_batch.part].learn(micro_batch)
        self._ended(micro_batch)
        micro_batch.scope = None  # break the cycle of references: both are freed at once

    def forget(self, micro_batches: list[MicroBatch]) -> None:
        """Drop micro-batches whose forward or backward failed, or whose backward will never come: nothing is learnt
        from them."""
        with self._lock:
            for micro_batch in micro_batches:
                self.micro_batches.remove(micro_batch)
                self._device.activities.put_down(micro_batch.activity)
                self._parts[micro_batch.part].release(micro_batch)
                micro_batch.scope = None
            self._let_units_go()

    def forget_all(self) -> None:
        self.forget(list(self.micro_batches))
        self._device.activities.put_down_all()

    def _let_units_go(self) -> None:
        """With nothing in flight, no weights have to stay whole; left so, an optimizer step would pass them by."""
        busy = {micro_batch.part for micro_batch in self.micro_batches}
        for name, part in self._parts.items():
            if name not in busy and part.managed.units is not None:
                part.managed.units.keep_whole(False)
