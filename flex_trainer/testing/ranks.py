"""Several ranks on one machine, kept alive between jobs: starting a rank takes seconds, most tests take none.

    with RankPool(2) as ranks:
        losses = ranks.run("my_package.jobs:train", steps=3)    # one result per rank

A job is a function named `package.module:name`; its keyword arguments and its result travel by pickle. Inside, a gloo
process group of all ranks exists, and so do the variables that launchers set (RANK, WORLD_SIZE, ...).
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from importlib import import_module
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_GRACE_S = 5.0


class RankError(RuntimeError):
    """A job failed on at least one rank; the message has every rank's traceback."""

    def __init__(self, function: str, world_size: int, failures: dict[int, str]) -> None:
        lines = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
        super().__init__("\n".join([f"{function} failed on {len(failures)} of {world_size} ranks", *lines]))
        self.failures = failures
        """By rank: the traceback, or how the process ended."""


class RankPool:
    """Processes that share a gloo process group.

    After a job that failed or took too long the processes are started anew: their group may be out of step.

    Args:
        world_size: number of ranks.
        timeout_s: seconds that a job may take.
    """

    def __init__(self, world_size: int, timeout_s: float = 240.0) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._store: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: str, /, timeout_s: float | None = None, **arguments: Any) -> list[Any]:
        """Call `function(**arguments)` on every rank; returns what the ranks returned, in their order.

        Raises:
            RankError: it raised on a rank, or a rank died.
            TimeoutError: not all ranks were done in time; all were killed.
        """
        if any(not process.is_alive() for process in self._processes):
            self.close()  # a rank died in between
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers, failures = self._collect(timeout_s or self.timeout_s, function)
        if failures:
            self.close()
            raise RankError(function, self.world_size, failures)
        return [answers[rank] for rank in range(self.world_size)]

    def _collect(self, timeout_s: float, function: str) -> tuple[dict[int, Any], dict[int, str]]:
        """Answers and failures by rank. Once a rank has failed, the others get a few seconds more."""
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self._pipes))
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting.values()), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                if failures:
                    return answers, failures
                self.close()
                raise TimeoutError(f"{function}: ranks {sorted(waiting)} were not done in {timeout_s:g} s")
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    is_done, answer = waiting.pop(rank).recv()
                except EOFError:
                    self._processes[rank].join(_GRACE_S)
                    is_done, answer = False, f"ended with exit code {self._processes[rank].exitcode}"
                (answers if is_done else failures)[rank] = answer
                if not is_done:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return answers, failures

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = tempfile.TemporaryDirectory()
        settings = {
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
            "CUDA_VISIBLE_DEVICES": "",  # gloo ranks compute on the CPU: as many as are asked for, on any machine
        }
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)  # a spawned process has them before it imports anything
        try:
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                store = str(Path(self._store.name) / "store")
                process = context.Process(
                    target=_serve, args=(rank, self.world_size, store, theirs, sys.path), daemon=True
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def close(self) -> None:
        """End all ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._store is not None:
            self._store.cleanup()
            self._store = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def free_port() -> int:
    """A TCP port of this machine that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _share_meshes() -> None:
    """Give every model of the same sizes the same mesh: each would make process groups of its own, whose threads stay
    for good and wake up a hundred times a second."""
    mixin: Any = import_module("transformers.distributed.mixin")
    original = mixin.initialize_distributed_mesh
    if hasattr(original, "meshes"):
        return
    meshes: dict[tuple[int, ...], Any] = {}

    def shared(config: Any) -> Any:
        sizes = (config.pp_size, config.dp_replicate_size, config.fsdp_size, config.tp_size, config.ep_size)
        if sizes not in meshes:
            meshes[sizes] = original(config)
        return meshes[sizes]

    vars(shared)["meshes"] = meshes
    mixin.initialize_distributed_mesh = shared


def _serve(rank: int, world_size: int, store: str, pipe: Connection, search_path: list[str]) -> None:
    """A rank's life: jobs until the pipe closes."""
    sys.path[:] = search_path
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            module_name, name = function.split(":")
            _share_meshes()
            answer = (True, getattr(import_module(module_name), name)(**arguments))
        except BaseException:  # whatever it was, the other side raises it
            answer = (False, traceback.format_exc())
        pipe.send(answer)
