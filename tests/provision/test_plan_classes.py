"""Deep models of every family are planned by kinds of layers, also where a cache grows from layer to layer."""

from __future__ import annotations

import pytest
import torch

from flex_trainer.cost.profile import Profile
from flex_trainer.models.discovery import discover
from flex_trainer.models.inputs import shape_of
from flex_trainer.symbolic.forward import SymbolicModel
from flex_trainer.testing.tiny import FAMILIES, tiny_batch, tiny_model
from tests.tiers import STRUCTURES, sweep_over

NUM_LAYERS = 24
HYBRID = ("gpt_oss", "qwen3_5_moe_text")
"""Two kinds of attention."""


@pytest.mark.parametrize("family", sweep_over([*dict.fromkeys((*STRUCTURES, *FAMILIES))], quick=HYBRID[:1]))
def test_layers_of_a_kind_are_one_class(family: str) -> None:
    model = tiny_model(family, num_hidden_layers=NUM_LAYERS)
    model.config.get_text_config().use_cache = True
    model_map, batch = discover(model), tiny_batch(model, 2, 16)
    twin = SymbolicModel(model, torch.device("cpu"), has_fused_attention=False, find=model_map.in_copy)
    traced = twin.trace((), batch)
    profile, shape = Profile(), shape_of((), batch)
    profile.observe(shape, traced.trace, traced.routed_pairs)
    segments = profile.graph(shape).repeated
    assert len(segments) == NUM_LAYERS + 1
    kinds = {
        tuple((operator.site.kind, operator.parent, operator.inputs) for operator in segment.operators)
        for segment in segments.classes
        if segment.layer >= 0
    }
    assert len(segments.classes) <= len(kinds) + 2
    class_of = dict(zip(segments.positions.layers, segments.class_of, strict=True))
    highest: dict[int, int] = {}
    for call in traced.trace.calls:
        if call.site.kind == "layer" and call.site.layer >= 0 and call.work is not None:
            number = class_of[call.site.layer]
            highest[number] = max(highest.get(number, 0), call.work.forward_transient_bytes)
    for number, num_bytes in highest.items():  # the most that any layer of the class has alive
        [layer] = [op for op in segments.classes[number].operators if op.site.kind == "layer"]
        assert layer.forward_transient_bytes == num_bytes
