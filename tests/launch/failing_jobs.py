"""What one rank does: `python -m tests.launch.failing_jobs JOB`, with the variables that launchers set."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from flex_trainer.launch import failing_rank
from flex_trainer.launch.failing_rank import ranks_fail_together, watch
from flex_trainer.ranks import launched_rank


def main(job: str) -> None:
    failing_rank.GRACE_SECONDS = failing_rank._TELL_SECONDS = 0.5
    if job.startswith("end"):
        _end(job)
        return
    with ranks_fail_together():
        torch.distributed.init_process_group("gloo")
        watch()
        if job == "uneven":
            for _ in range(2 if launched_rank() == 1 else 3):
                torch.distributed.all_reduce(torch.ones(3))
        else:
            _fail()


def _end(job: str) -> None:
    """One process, which believes in another that is not there."""
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 1, True)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    if "slowly" in job:  # the thread comes back from the store while the interpreter is taken apart
        failing_rank._WAIT_SECONDS = 1.0
        vars(sys.modules["__main__"])["slow"] = _Slow()
    with ranks_fail_together():
        watch()
        watcher: Any = failing_rank._STATE.watcher
        time.sleep(0.3)
        if job == "end-slowly-without-stopping":
            failing_rank.atexit.unregister(watcher.stop)
            watcher.stop = lambda: None
        if job == "end-after-destroying":
            torch.distributed.destroy_process_group()


class _Slow:
    """Takes its time to go, after all functions of atexit."""

    def __del__(self, sleep: Any = time.sleep) -> None:
        sleep(2.0)


def _fail() -> None:
    torch.distributed.barrier()
    if launched_rank() == 0:
        time.sleep(1.5)  # the others wait meanwhile
        failing_rank._STATE.watcher._store.set("time", str(time.time()))  # type: ignore[union-attr]
        raise ValueError("rank 0 has had enough")
    _Counted.watch(failing_rank._STATE.watcher)
    time.sleep(60)


class _Counted:
    """The connection of the thread that waits: counts what it asks before it is woken."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.num_asked = 0

    @classmethod
    def watch(cls, watcher: Any) -> None:
        counted = watcher._waiting = cls(watcher._waiting)
        failing_rank._STATE.flushes.append(
            lambda code: print(
                f"seconds after: {time.time() - float(counted._store.get('time')):.2f}; asked: {counted.num_asked}",
                file=sys.stderr,
            )
        )

    def wait(self, *args: Any) -> None:
        self.num_asked += 1
        self._store.wait(*args)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def get(self, key: str) -> bytes:
        return self._store.get(key)


if __name__ == "__main__":
    main(sys.argv[1])
