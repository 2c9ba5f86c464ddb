"""What is put back before a micro-batch runs again."""

from __future__ import annotations

import random
import weakref
from typing import Any

import torch
from torch import nn

from flex_trainer.snapshot import Bookkeeping, ModuleValues
from flex_trainer.testing.tiny import tiny_model


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


def test_copies_of_large_unchanged_buffers_are_shared() -> None:
    module = nn.Module()
    for name in ("still", "written"):
        module.register_buffer(name, torch.zeros(20_000))
    first = ModuleValues([module])
    module.get_buffer("written").add_(1)
    second = ModuleValues([module], first)
    copies = [
        {name: saved._copies[id(buffer)][2] for name, buffer in module.named_buffers()} for saved in (first, second)
    ]
    assert copies[0]["still"] is copies[1]["still"]
    assert [float(one["written"].sum()) for one in copies] == [0.0, 20_000.0]


def test_statistics_of_batch_norm_come_back() -> None:
    """It moves no version of theirs."""
    module: Any = nn.BatchNorm1d(2)
    first = ModuleValues([module])
    module(torch.randn(8, 2))
    second = ModuleValues([module], first)
    means = module.running_mean.clone()
    module(torch.randn(8, 2))
    second.restore()
    assert torch.equal(module.running_mean, means) and not torch.equal(means, torch.zeros(2))
    first.restore()
    assert torch.equal(module.running_mean, torch.zeros(2))


def test_flags_and_submodules_come_back() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    module.register_buffer("expanded", torch.zeros(1).expand(4))  # nothing can be written into it
    inner, dropout = module[0], module[1]
    saved = ModuleValues(module.modules())
    module.eval()
    inner.weight.requires_grad_(False)
    module[1] = nn.Identity()
    saved.restore()
    assert module[1] is dropout and dropout.training and module.training and inner.weight.requires_grad


def test_activations_that_a_module_keeps_are_not_kept_longer() -> None:
    module: Any = nn.Linear(2, 2)
    module.last = torch.ones(3)
    module.history = [torch.ones(3)]
    last, item = weakref.ref(module.last), weakref.ref(module.history[0])
    saved = ModuleValues([module])
    module.last, module.history = torch.ones(4), []
    assert last() is None and item() is None
    saved.restore()
    assert module.last.shape == (4,)


def test_a_later_capture_holds_only_what_has_changed() -> None:
    model = tiny_model("deepseek_v3")
    layer: Any = model.model.layers[0]
    layer.calls, layer.seen, layer.tracker = 0, [1], object()
    first = ModuleValues(model.modules())
    still = ModuleValues(model.modules(), first)
    assert still._base is first._base and not still._changed and still._trained is first._trained
    assert all(copied is first._copies[key] for key, copied in still._copies.items()) and first._copies
    layer.calls += 1
    layer.seen.append(2)
    later = ModuleValues(model.modules(), still)
    assert [record.module for record in later._changed.values()] == [layer]
    assert ModuleValues(model.modules(), later)._changed == later._changed  # not captured anew
    layer.calls, layer.tracker = 7, 3  # now a number, where another object was left alone
    newest = ModuleValues(model.modules(), later)
    layer.calls = layer.tracker = 9
    layer.seen.clear()
    model.model.layers[1].mlp.experts.longest = 5
    for captured, expected in ((newest, (7, [1, 2], 3)), (later, (1, [1, 2], 3)), (first, (0, [1], 3))):
        captured.restore()
        assert (layer.calls, layer.seen, layer.tracker) == expected
        assert not hasattr(model.model.layers[1].mlp.experts, "longest")


def test_a_large_tensor_that_died_counts_as_a_change() -> None:
    module: Any = nn.Module()
    module.cache = torch.ones(3)
    first = ModuleValues([module])
    module.cache = None
    second = ModuleValues([module], first)
    module.cache = torch.ones(4)
    second.restore()
    assert module.cache is None


def test_submodules_that_were_exchanged_are_captured() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2))
    first = ModuleValues(module.modules())
    other: Any = nn.Module()
    other.calls = 1
    module[0] = other
    second = ModuleValues(module.modules(), first)
    other.calls = 2
    second.restore()
    assert module[0] is other and other.calls == 1


def test_modules_of_torch_are_searched_only_where_something_was_added() -> None:
    plain, counting = nn.Linear(2, 2), nn.Linear(2, 2)
    counting.calls = 1  # type: ignore[assignment]
    saved = ModuleValues([plain, counting])
    assert [record._values is None for record in saved._base] == [True, False]
    plain.calls, counting.calls = 1, 2  # type: ignore[assignment]
    later = ModuleValues([plain, counting], saved)
    assert list(later._changed) == [0, 1]
    saved.restore()
    assert not hasattr(plain, "calls") and counting.calls == 1
