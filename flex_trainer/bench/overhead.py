"""What the engine itself costs when memory is ample: one process, the same batch, sides in turns.

    python -m flex_trainer.bench.overhead --layers 2 --rounds 14     # kernels of the reference shape
    python -m flex_trainer.bench.overhead --batch 1 --tokens 16      # small tensors: what is left is Python

Three sides: plain; plain with saved-tensor hooks that do nothing; FlexTrainer's runtime under a limit that nothing
reaches. CPU seconds (all threads, user and system) say more than wall time on a machine that others use as well; of all
rounds the least is the one that was disturbed least.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import resource
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, set_seed

from flex_trainer.bench.child import ByteText
from flex_trainer.bench.shapes import REFERENCE
from flex_trainer.config import FlexConfig
from flex_trainer.memory.enforce import return_freed_memory
from flex_trainer.runtime import FlexRuntime

_WARM_UP_ROUNDS = 3


@dataclass(frozen=True)
class Cost:
    """One forward and backward."""

    forward_seconds: float
    backward_seconds: float
    system_seconds: float
    num_page_faults: int

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


def compare(num_layers: int, batch_size: int, num_tokens: int, num_rounds: int) -> dict[str, list[Cost]]:
    """Costs of every round, by side. Losses of all sides are checked to be equal.

    Raises:
        RuntimeError: a side has another loss than the plain one.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return_freed_memory()
    set_seed(0)
    config = CONFIG_MAPPING[REFERENCE.architecture](**{**REFERENCE.config, "num_hidden_layers": num_layers})
    model = AutoModelForCausalLM.from_config(config).train()
    managed = copy.deepcopy(model)
    runtime = FlexRuntime(FlexConfig(memory_limit="auto"))
    runtime.attach(managed)
    text = ByteText([num_tokens] * batch_size)
    batch = {key: torch.stack([text[i][key] for i in range(batch_size)]) for key in text[0]}

    def plain() -> torch.Tensor:
        return model(**batch).loss

    def with_hooks() -> torch.Tensor:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return model(**batch).loss

    def with_engine() -> torch.Tensor:
        return managed(**batch).loss

    sides: dict[str, Callable[[], torch.Tensor]] = {"plain": plain, "hooks": with_hooks, "engine": with_engine}
    costs: dict[str, list[Cost]] = {name: [] for name in sides}
    for number in range(_WARM_UP_ROUNDS + num_rounds):
        losses = []
        for name in list(sides)[:: 1 if number % 2 else -1]:  # no side is always first
            (managed if name == "engine" else model).zero_grad(set_to_none=True)
            start = resource.getrusage(resource.RUSAGE_SELF)
            loss = sides[name]()
            middle = resource.getrusage(resource.RUSAGE_SELF)
            with runtime.backward() if name == "engine" else contextlib.nullcontext():
                loss.backward()
            end = resource.getrusage(resource.RUSAGE_SELF)
            losses.append(float(loss.detach()))
            if number >= _WARM_UP_ROUNDS:
                costs[name].append(_cost(start, middle, end))
        if len(set(losses)) > 1:
            raise RuntimeError(f"the sides have different losses: {losses}")
    runtime.detach()
    return costs


def _cost(start: resource.struct_rusage, middle: resource.struct_rusage, end: resource.struct_rusage) -> Cost:
    return Cost(
        forward_seconds=middle.ru_utime + middle.ru_stime - start.ru_utime - start.ru_stime,
        backward_seconds=end.ru_utime + end.ru_stime - middle.ru_utime - middle.ru_stime,
        system_seconds=end.ru_stime - start.ru_stime,
        num_page_faults=end.ru_minflt - start.ru_minflt,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What the engine itself costs when memory is ample.")
    parser.add_argument("--layers", type=int, default=REFERENCE.config["num_hidden_layers"])
    parser.add_argument("--batch", type=int, default=REFERENCE.batch_size)
    parser.add_argument("--tokens", type=int, default=REFERENCE.sequence_length)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    costs = compare(args.layers, args.batch, args.tokens, args.rounds)
    print("least CPU milliseconds of all rounds; page faults in thousands")
    print(f"{'side':8}{'forward':>10}{'backward':>10}{'both':>10}{'of which system':>18}{'faults':>9}")
    for name, runs in costs.items():
        forward = min(run.forward_seconds for run in runs) * 1e3
        backward = min(run.backward_seconds for run in runs) * 1e3
        least = min(runs, key=lambda run: run.seconds)
        print(
            f"{name:8}{forward:10.1f}{backward:10.1f}{least.seconds * 1e3:10.1f}{least.system_seconds * 1e3:18.1f}"
            f"{least.num_page_faults / 1e3:9.1f}"
        )


if __name__ == "__main__":
    main()
