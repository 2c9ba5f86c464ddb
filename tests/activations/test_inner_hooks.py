"""Hooks that were there in the first run and are gone, or new, when the replay comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from flex_trainer.activations.hooks import InnerHooks
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Scope
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.steps import ByFunction, instrumented
from flex_trainer.testing.tiny import tiny_batch, tiny_model


@pytest.mark.parametrize("when", ["removed before backward", "added before backward"])
def test_a_replay_has_the_hooks_of_the_first_run(when: str) -> None:
    def gradients(is_managed: bool) -> dict[str, torch.Tensor]:
        model = tiny_model("llama")
        batch = tiny_batch(model, batch_size=2, sequence_length=16)
        projection = model.model.layers[0].mlp.gate_proj

        def act(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
            return output * 3 + 1

        handles = [projection.register_forward_hook(act)] if when.startswith("removed") else []
        if is_managed:
            modules = dict(model.named_modules())
            scope = Scope(
                ByFunction(lambda site: Strategy.RECOMPUTE if site.kind == "mlp" else Strategy.KEEP),
                Ledger(),
                parameters=[*model.parameters(), *model.buffers()],
                modules=modules,
            )
            with instrumented(model), scope.open():
                loss = model(**batch).loss
        else:
            loss = model(**batch).loss
        if when.startswith("removed"):
            handles.pop().remove()
        else:
            handles.append(projection.register_forward_hook(act))
        loss.backward()
        present = len(projection._forward_hooks)
        assert present == (0 if when.startswith("removed") else 1)  # the replay leaves the hooks as it found them
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, managed = gradients(False), gradients(True)
    assert plain.keys() == managed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(managed[name], gradient, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("is_first_gone", [False, True])
def test_two_threads_may_run_one_module_at_a_time(is_first_gone: bool) -> None:
    """A replay of one micro-batch lies wholly inside the forward of another, on another thread, and the reverse."""
    inner = nn.Linear(4, 4)
    module = nn.Sequential(inner, nn.Tanh())
    seen: list[str] = []
    meet: dict[str, Callable[[], None]] = {}

    def look(_: Any, args: Any) -> None:
        name = threading.current_thread().name
        seen.append(name)
        meet.pop(name, lambda: None)()

    looking = inner.register_forward_pre_hook(look)
    acting = inner.register_forward_hook(lambda _, args, output: output * 3)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(2, 4, requires_grad=True)
        scope = Scope(
            ByFunction(lambda site: Strategy.RECOMPUTE),
            Ledger(),
            parameters=inner.parameters(),
            modules={"block": module},
        )
        with scope.open():
            return scope.run(Site("block", "mlp", 0), module, x).sum(), x

    def gradient(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        loss.backward()
        assert x.grad is not None
        return x.grad

    tables = [dict(table) for table in (inner._forward_pre_hooks, inner._forward_hooks)]
    wanted = gradient(*forward())
    first = forward()
    if is_first_gone:
        acting.remove()
        tables[1].clear()
    seen.clear()
    found: list[torch.Tensor] = []

    def in_between() -> None:
        thread = threading.Thread(target=lambda: found.append(gradient(*first)), name="replay")
        thread.start()
        thread.join()

    def forward_around() -> None:
        meet["forward"] = in_between
        found.append(gradient(*forward()))

    thread = threading.Thread(target=forward_around, name="forward")
    thread.start()
    thread.join()
    assert seen == ["forward"], "once in the forward, in no replay"
    assert torch.equal(found[0], wanted)
    assert torch.equal(found[1], wanted) is not is_first_gone
    assert [dict(table) for table in (inner._forward_pre_hooks, inner._forward_hooks)] == tables
    looking.remove()
    assert not inner._forward_pre_hooks and not inner._forward_hooks_with_kwargs


def test_hooks_put_there_for_a_replay_only_keep_their_order_and_arguments() -> None:
    inner = nn.Linear(4, 4)
    module = nn.Sequential(inner)
    handles = [
        inner.register_forward_hook(lambda _, args, kwargs, output: output + 1, with_kwargs=True),
        inner.register_forward_hook(lambda _, args, output: output * 2),
        inner.register_forward_hook(lambda _, args, output: output - 5),
    ]
    hooks, x = InnerHooks(module), torch.ones(1, 4)
    with hooks.first_run(lambda: 0):
        wanted = module(x)
    handles[0].remove()
    handles[2].remove()
    with hooks.replay():
        assert torch.equal(module(x), wanted)
    assert list(inner._forward_hooks) == [handles[1].id] and not inner._forward_hooks_with_kwargs
