"""What `flex-trainer bench survive` runs: random micro-batches, in a process of their own, and single failures."""

from __future__ import annotations

import functools
import gc
import random
import tempfile
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from flex_trainer.config import FlexConfig
from flex_trainer.memory.enforce import process_limit, return_freed_memory
from flex_trainer.memory.process import process_memory
from flex_trainer.runtime import FlexRuntime
from flex_trainer.steps.transaction import Transaction
from flex_trainer.testing.failures import FailingAllocations
from flex_trainer.testing.fake_meter import BASE_BYTES, with_fake_meter
from flex_trainer.testing.tiny import tiny_batch, tiny_model

ARCHITECTURE = "mixtral"
_SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16}
_BATCH_SIZE = 4
_LENGTHS = range(32, 513, 32)
_MIB = 2**20
_ROOM_MIB = {("recompute",): (75, 140), ("offload",): (85, 140), ("recompute", "offload"): (75, 140)}
"""Least and most that a run may use above what is in use at its start."""
_WARM_UP_MIB = 110
_ACCUMULATION = 2
_EVALUATION_EVERY = 10
_NUM_STEPS = 2
_IN_FLIGHT_BYTES = 2**17


def _deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)


def random_micro_batches(*, num_runs: int, num_per_run: int, is_flex: bool) -> dict[str, Any]:
    """Runs of micro-batches of random length and skew, each under a memory limit and strategies of its own, with
    evaluation in between; a real cap on the process lies where the memory limit does. The cyclic garbage collector is
    off.

    Returns:
        The losses of all runs; with FlexTrainer also peaks over the limit, bytes that were not given back, and counts.
    """
    _deterministic()
    return_freed_memory()
    _warm_up()
    directory = Path(tempfile.mkdtemp(prefix="flex-bench-"))
    totals: dict[str, Any] = {"losses": [], "num_over": 0, "live_bytes": 0, "num_spikes": 0, "num_retries": 0}
    gc.collect()
    gc.disable()
    for number in range(num_runs):
        generator = random.Random(number)
        strategies = generator.choice(list(_ROOM_MIB))
        room_bytes = generator.randint(*_ROOM_MIB[strategies]) * _MIB
        model = tiny_model(ARCHITECTURE, seed=number, **_SIZES)
        runtime: FlexRuntime | None = None
        cap: Any = nullcontext()
        if is_flex:
            return_freed_memory()
            limit_bytes = process_memory().rss_bytes + room_bytes
            profile = str(directory / "profile.json")
            planner = ("optimal", "bandwidth")[number % 2]
            runtime = FlexRuntime(FlexConfig(limit_bytes, strategies, seed_profile=profile, planner=planner))
            runtime.attach(model)
            cap = process_limit(limit_bytes)
        with cap:
            totals["losses"] += _train(model, runtime, generator, num_per_run, totals)
        if runtime is not None:
            totals["num_over"] += sum(record.is_over_limit for record in runtime.records)
            totals["num_spikes"] += sum(record.is_spike for record in runtime.records)
            totals["num_retries"] += len(runtime.retries)
            runtime.detach()
        del model, runtime
        gc.collect()  # a model of transformers is a cycle; what the engine holds is counted before
    return totals


def _warm_up() -> None:
    """What a process takes once, whatever it trains, comes before the first limit: buffers of libraries (32 MiB for
    numpy's products), stacks of threads (8 MiB each), code that is read from disk."""
    model = tiny_model(ARCHITECTURE, **_SIZES)
    runtime = FlexRuntime(FlexConfig(process_memory().rss_bytes + _WARM_UP_MIB * _MIB, ("recompute", "offload")))
    runtime.attach(model)
    for _ in range(2):
        loss = model(**tiny_batch(model, _BATCH_SIZE, _LENGTHS[-1])).loss
        with runtime.backward():
            loss.backward()
    runtime.detach()


def _train(
    model: PreTrainedModel, runtime: FlexRuntime | None, generator: random.Random, num: int, totals: dict[str, Any]
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = None if runtime is None else Transaction(runtime)

    def forward_and_backward(batch: dict[str, torch.Tensor]) -> float:
        loss = model(**batch).loss
        ledgers = [] if runtime is None else [micro_batch.ledger for micro_batch in runtime.in_flight]
        with nullcontext() if runtime is None else runtime.backward():
            (loss / _ACCUMULATION).backward()
        value = loss.item()
        del loss
        totals["live_bytes"] += sum(ledger.held_bytes + ledger.recovered_bytes for ledger in ledgers)
        return value

    losses = []
    for number in range(num):
        batch = _batch(model, generator)
        run = forward_and_backward if step is None else functools.partial(step.run_micro_batch, forward_and_backward)
        losses.append(run(batch))
        if number % _ACCUMULATION == _ACCUMULATION - 1:
            optimizer.step()
            optimizer.zero_grad()
        if number % _EVALUATION_EVERY == 0:
            model.eval()
            with torch.no_grad():
                losses.append(model(**tiny_batch(model, 1, 64, seed=number)).loss.item())
            model.train()
    return losses


def _batch(model: PreTrainedModel, generator: random.Random) -> dict[str, torch.Tensor]:
    """Most batches are short. A random share of the tokens is one and the same: they all go to the same experts."""
    length = _LENGTHS[int(len(_LENGTHS) * generator.random() ** 2)]
    batch = tiny_batch(model, _BATCH_SIZE, length, seed=generator.randrange(2**30))
    share = generator.choice((0.0, 0.0, generator.random()))
    batch["input_ids"][:, : int(share * length)] = 7
    return batch


class Injection:
    """Short runs of a tiny model in which one allocation fails, compared with one in which none does."""

    def __init__(self, where: str) -> None:
        _deterministic()
        self._where = where
        self._directory = tempfile.TemporaryDirectory(prefix="flex-bench-")
        self._strategies = ("offload",) if where == "offload" else ("recompute",)
        self._reference = self._run(None)[0]
        # The first run finds sizes out; those after it read them.
        self.num_points = min(self._run(())[1].num_seen for _ in range(2))

    def ends_the_same(self, point: int) -> bool | None:
        """Whether the weights are those of a run in which nothing failed; None: the run did not get to this point."""
        state, failing, num_retries = self._run((point,))
        if failing.num_failed == 0:
            return None
        is_equal = all(torch.equal(tensor, self._reference[name]) for name, tensor in state.items())
        return is_equal and num_retries == 1

    def _run(self, points: Collection[int] | None) -> tuple[dict[str, torch.Tensor], Any, int]:
        """Final weights, the failing allocations, and the number of retries of a run; a plain one when None."""
        model = tiny_model(ARCHITECTURE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if points is None:
            for seeds in self._steps():
                for seed in seeds:
                    model(**tiny_batch(model, 2, 64, seed=seed)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return model.state_dict(), None, 0
        profile = str(Path(self._directory.name) / "profile.json")
        runtime = FlexRuntime(FlexConfig(BASE_BYTES + 1_900_000, self._strategies, seed_profile=profile))
        with_fake_meter(runtime)
        runtime.attach(model)
        if self._where == "offload":
            # Copies on their way may otherwise hold more than all of this model.
            runtime.books.offloading.store().max_in_flight_bytes = _IN_FLIGHT_BYTES
        step = Transaction(runtime)
        failing = FailingAllocations(runtime, self._where, points)

        def forward_and_backward(seed: int) -> None:
            with failing:
                loss = model(**tiny_batch(model, 2, 64, seed=seed)).loss
                with runtime.backward():
                    loss.backward()

        for seeds in self._steps():
            for seed in seeds:
                step.run_micro_batch(forward_and_backward, seed)
            optimizer.step()
            optimizer.zero_grad()
        runtime.detach()
        return model.state_dict(), failing, len(runtime.retries)

    @staticmethod
    def _steps() -> list[range]:
        return [range(_ACCUMULATION * step, _ACCUMULATION * (step + 1)) for step in range(_NUM_STEPS)]


def injected_failures(*, where: str, num_points: int) -> dict[str, int]:
    """Let single allocations fail at `num_points` random points of one place.

    Returns:
        `num_points` that were reached, and `num_unequal`: runs that ended otherwise than one in which nothing failed.
    """
    injection = Injection(where)
    generator = random.Random(where)
    answers: list[bool] = []
    while len(answers) < num_points:
        answer = injection.ends_the_same(generator.randrange(injection.num_points))
        answers += [] if answer is None else [answer]
    return {"num_points": len(answers), "num_unequal": answers.count(False)}
