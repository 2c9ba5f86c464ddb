"""All-to-all on a CPU as receives and sends, receives first.

gloo's own all-to-all posts its sends first. What tells the peer "I am ready to receive" then waits in the socket behind
the rows that are sent, so that with two ranks of which one is late, the second direction begins when the first has
ended: twice the time on a slow link. With all receives posted before any send, both directions run at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist


def start_pairwise(
    output: torch.Tensor, rows: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> PairwiseWork:
    """Start it. Sizes are in rows, by rank of the group; a rank keeps none for itself.

    Args:
        output: (sum(received), ...), contiguous.
        rows: (sum(sent), ...), contiguous.
    """
    works: list[Any] = []
    for rank, part in _parts(output, received):
        works.append(dist.irecv(part, group=group, group_src=rank))
    for rank, part in _parts(rows, sent):
        works.append(dist.isend(part, group=group, group_dst=rank))
    return PairwiseWork(works, (output, rows))


class PairwiseWork:
    """Receives and sends under way. gloo notes the end of one only in `wait`, so who asks before that has a thread
    wait for it.

    Args:
        works: of the collective library.
        tensors: what they read and write.
    """

    def __init__(self, works: Sequence[Any], tensors: tuple[torch.Tensor, ...]) -> None:
        self._works: Sequence[Any] = works
        self._tensors = tensors
        self._future: Future[None] | None = None

    def wait(self) -> None:
        """Return when all of them have ended."""
        if self._future is None:
            self._wait_for_all()
        else:
            self._future.result()

    def is_completed(self) -> bool:
        return self.get_future().done()

    def get_future(self) -> Future[None]:
        """Ends when all of them have."""
        if self._future is None:
            self._future = Future()
            _WATCHER.watch(self)
        return self._future

    def watch(self) -> None:
        """In the watching thread."""
        assert self._future is not None
        try:
            self._wait_for_all()
        except BaseException as error:  # raised where it is waited for
            self._future.set_exception(error)
        else:
            self._future.set_result(None)

    def _wait_for_all(self) -> None:
        works, self._works = self._works, ()  # gloo lets each be waited for once; a second time would never end
        for work in works:
            work.wait()


class _Watcher:
    """A thread that waits for exchanges in their order. A daemon: a peer that is gone must not hold up the end of the
    process."""

    def __init__(self) -> None:
        self._works: SimpleQueue[PairwiseWork] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, work: PairwiseWork) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="flex-exchanges", daemon=True)
            self._thread.start()
        self._works.put(work)

    def _run(self) -> None:
        while True:
            work = self._works.get()
            work.watch()
            del work  # what it holds lives no longer than it runs


def _parts(tensor: torch.Tensor, sizes: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
    """Rank and rows of those that get or give any."""
    return [(rank, part) for rank, part in enumerate(tensor.split(list(sizes))) if len(part)]


_WATCHER = _Watcher()
