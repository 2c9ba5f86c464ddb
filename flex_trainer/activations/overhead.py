"""What a recomputed region costs the host on top of its kernels: measured, since it is Python's time, not the device's.

The planner weighs it against what recompute frees: for a norm or an activation it is most of the cost on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Scope
from flex_trainer.strategy import Site, Strategy

_NUM_REGIONS = 24
_NUM_ROUNDS = 5
_WIDTH = 8


def recompute_overhead_seconds(device: torch.device, clock: Callable[[], float] = time.perf_counter) -> float:
    """Host seconds of one recomputed region, first run and recompute, on top of its kernels' launches: the median of a
    few rounds over a chain of small modules (some milliseconds in all).

    Kernels of both sides are the same, so on CUDA the difference of times on the host is what is asked for. `clock`:
    in seconds; that of the process where others take the machine's time.
    """
    # In isolation: nothing here may move what a run draws, or be seen by a scope of the caller.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        modules = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()).to(device) for _ in range(_NUM_REGIONS)]
    x = torch.zeros(1, _WIDTH, device=device).requires_grad_()
    differences = []
    for number in range(_NUM_ROUNDS + 1):
        plain = _seconds(modules, x, None, clock)
        recomputed = _seconds(modules, x, Strategy.RECOMPUTE, clock)
        if number:  # the first use of a path is never typical
            # A recomputation runs the operator's forward once more: launches that the cost model counts as the
            # operator's own.
            forward, both = plain
            differences.append(recomputed[1] - both - forward)
    return max(statistics.median(differences) / _NUM_REGIONS, 0.0)


class _Everywhere:
    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def strategy(self, site: Site) -> Strategy:
        return self._strategy


def _seconds(
    modules: list[nn.Sequential], x: torch.Tensor, strategy: Strategy | None, clock: Callable[[], float]
) -> tuple[float, float]:
    """Of forward, and of forward and backward."""
    start = clock()
    with torch.enable_grad():
        if strategy is None:
            loss = _chain(modules, x, lambda number, module, h: module(h))
        else:
            sites = [Site(str(number), "linear", 0) for number in range(len(modules))]
            parameters = [parameter for module in modules for parameter in module.parameters()]
            named = dict(zip((site.name for site in sites), modules, strict=True))
            scope = Scope(_Everywhere(strategy), Ledger(), parameters=parameters, modules=named)
            with scope.open():
                loss = _chain(modules, x, lambda number, module, h: scope.run(sites[number], module, h))
    middle = clock()
    torch.autograd.grad(loss, x)
    return middle - start, clock() - start


def _chain(
    modules: list[nn.Sequential], x: torch.Tensor, run: Callable[[int, nn.Sequential, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    h = x
    for number, module in enumerate(modules):
        h = run(number, module, h)
    return h.sum()
