"""Hooks that were there in the first run and are gone, or new, when the recomputation comes."""

from __future__ import annotations

import threading
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
def test_a_recompute_has_the_hooks_of_the_first_run(when: str) -> None:
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
        assert present == (
            0 if when.startswith("removed") else 1
        )  # the recomputation leaves the hooks as it found them
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, managed = gradients(False), gradients(True)
    assert plain.keys() == managed.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(managed[name], gradient, rtol=0, atol=0, msg=name)


def scaled(factor: float, more: float = 0.0) -> Any:
    """A hook that acts."""

    def act(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * factor + more

    return act


@pytest.mark.parametrize("is_gone", [False, True])
def test_two_threads_may_run_one_module_at_a_time(is_gone: bool) -> None:
    """A recomputation of one micro-batch begins in the middle of the forward of another, and ends after it."""
    inner = nn.Linear(4, 4)
    module = nn.Sequential(inner, nn.Tanh())
    seen: list[str] = []
    in_forward, in_recompute, after_forward = threading.Event(), threading.Event(), threading.Event()

    def look(_: nn.Module, args: Any) -> None:
        seen.append(threading.current_thread().name)
        if seen[-1] == "forward":
            in_forward.set()
            assert in_recompute.wait(30)

    def act(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if threading.current_thread().name == "recompute":
            in_recompute.set()
            assert after_forward.wait(30)
        return output * 3

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(2, 4, requires_grad=True)
        everything, modules = ByFunction(lambda site: Strategy.RECOMPUTE), {"block": module}
        scope = Scope(everything, Ledger(), parameters=inner.parameters(), modules=modules)
        with scope.open():
            return scope.run(Site("block", "mlp", 0), module, x).sum(), x

    def gradient(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        loss.backward()
        assert x.grad is not None
        return x.grad

    looking, acting = inner.register_forward_pre_hook(look), inner.register_forward_hook(act)
    wanted = gradient(*forward())
    first = forward()
    if is_gone:
        acting.remove()
    tables = [dict(table) for table in (inner._forward_pre_hooks, inner._forward_hooks)]
    seen.clear()
    found: dict[str, torch.Tensor] = {}

    def run_forward() -> None:
        second = forward()
        after_forward.set()
        recompute.join()
        found["forward"] = gradient(*second)

    def run_recompute() -> None:
        assert in_forward.wait(30)
        found["recompute"] = gradient(*first)

    threads = [
        threading.Thread(target=run_forward, name="forward"),
        threading.Thread(target=run_recompute, name="recompute"),
    ]
    recompute = threads[1]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [dict(table) for table in (inner._forward_pre_hooks, inner._forward_hooks)] == tables
    assert seen == ["forward"], "once in the forward, in no recomputation"
    assert torch.equal(found["recompute"], wanted)
    assert torch.equal(found["forward"], wanted) is not is_gone
    looking.remove()
    assert not inner._forward_pre_hooks


def test_hooks_put_there_for_a_recompute_only_keep_their_order_and_arguments() -> None:
    inner = nn.Linear(4, 4)
    module = nn.Sequential(inner)
    handles = [
        inner.register_forward_hook(lambda _, args, kwargs, output: output + 1, with_kwargs=True),
        inner.register_forward_hook(scaled(2.0)),
        inner.register_forward_hook(scaled(0.5, -5.0)),
    ]
    hooks, x = InnerHooks(module), torch.ones(1, 4)
    with hooks.first_run(lambda: 0):
        wanted = module(x)
    handles[0].remove()
    handles[2].remove()
    with hooks.recompute():
        assert torch.equal(module(x), wanted)
    assert list(inner._forward_hooks) == [handles[1].id] and not inner._forward_hooks_with_kwargs
