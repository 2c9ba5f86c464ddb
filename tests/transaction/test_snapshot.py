"""What is put back before a micro-batch runs again."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

from flex_trainer.snapshot import Bookkeeping, ModuleValues


def test_bookkeeping_is_put_back_in_place() -> None:
    class Owner:
        def __init__(self) -> None:
            self.num = 1
            self.lists = {"a": [1.0], "b": {"c": (2,)}}
            self.loss = torch.tensor(1.0)
            self.model = nn.Linear(1, 1)
            self.outputs = {"graph": self.model.weight * 2}

    owner = Owner()
    inner = owner.lists["a"]
    assert isinstance(inner, list)
    saved = Bookkeeping(owner)
    for _ in range(2):
        owner.num += 1
        inner.append(3.0)
        owner.lists["new"] = [1.0]
        owner.loss += 1
        owner.outputs = {}
        saved.restore()
        assert owner.num == 1 and owner.lists == {"a": [1.0], "b": {"c": (2,)}} and owner.lists["a"] is inner
        assert float(owner.loss) == 1.0
        assert owner.outputs == {}  # holds a graph: not kept alive


def test_what_modules_hold_comes_back() -> None:
    module: Any = nn.BatchNorm1d(2)
    module.cache = torch.ones(3)
    module.seen = [1]
    module.generator = torch.Generator().manual_seed(0)
    module.random = random.Random(0)
    saved = ModuleValues([module])
    mean, cache, seen = module.running_mean, module.cache, module.seen
    drawn = []
    for _ in range(2):
        module.running_mean = torch.ones(2)
        module.register_buffer("scale", torch.ones(1))
        module.longest = 7
        module.cache = None
        module.extra = torch.ones(2)
        seen.append(2)
        module.num_batches_tracked += 1
        drawn.append((torch.rand((), generator=module.generator).item(), module.random.random()))
        saved.restore()
        assert module.running_mean is mean and module.cache is cache and module.seen is seen == [1]
        assert "scale" not in module._buffers and not hasattr(module, "longest") and not hasattr(module, "extra")
        assert int(module.num_batches_tracked) == 0
    assert drawn[0] == drawn[1]


def test_copies_of_unchanged_buffers_are_shared() -> None:
    module = nn.BatchNorm1d(2)
    first = ModuleValues([module])
    assert module.num_batches_tracked is not None
    module.num_batches_tracked += 1
    second = ModuleValues([module], first)
    copies = [
        {name: saved._copies[id(buffer)][2] for name, buffer in module.named_buffers()} for saved in (first, second)
    ]
    assert copies[0]["running_mean"] is copies[1]["running_mean"]
    assert [int(one["num_batches_tracked"]) for one in copies] == [0, 1]
