"""Hooks that were there in the first run and are gone, or new, when the replay comes."""

from __future__ import annotations

import pytest
import torch

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Scope
from flex_trainer.strategy import Strategy
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
