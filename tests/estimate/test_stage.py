"""A traced stage repeats what was traced so that it equals the trace of all layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flex_trainer.cost.hardware import HARDWARE
from flex_trainer.estimate.mesh import cut_into_stages
from flex_trainer.estimate.skeleton import Representative, Skeleton
from flex_trainer.estimate.stage import Precision, StageGraph, expand, held_by_kind, trace_stage
from flex_trainer.testing.tiny import tiny_model
from tests.tiers import first_quick

FLOAT32 = Precision(None, "float32")


def graph_of(skeleton: Skeleton, pp: int = 1, index: int = 0, ep: int = 1, dispatch: str = "flex") -> StageGraph:
    stage = cut_into_stages(skeleton.num_layers, pp)[index]
    return expand(skeleton, stage, trace_stage(skeleton, stage, 2, 32, FLOAT32, HARDWARE["h100"], ep, dispatch))


@pytest.mark.parametrize("family", first_quick(["deepseek_v3", "gpt_oss", "llama"]))
def test_representatives_stand_for_all_layers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = Skeleton(tiny_model(family, num_hidden_layers=5))
    some = graph_of(skeleton)
    monkeypatch.setattr(
        skeleton, "representatives", lambda stage: {layer: Representative((layer,)) for layer in stage.layers}
    )
    whole = graph_of(skeleton)
    assert some.graph.shared_bytes == whole.graph.shared_bytes
    assert some.routed_layers == whole.routed_layers
    assert some.flops == whole.flops
    for one, other in zip(some.graph.segments, whole.graph.segments, strict=True):
        assert one.values == other.values
        for mine, theirs in zip(one.operators, other.operators, strict=True):
            # What is alive in forward may be rounded up to what it is in the last layer.
            assert mine.forward_transient_bytes >= theirs.forward_transient_bytes  # type: ignore[operator]
            assert mine.seconds == pytest.approx(theirs.seconds, rel=1e-12)  # means over other numbers of layers
            assert replace(mine, seconds=0.0, forward_transient_bytes=0) == replace(
                theirs, seconds=0.0, forward_transient_bytes=0
            )


def test_the_model_is_as_before() -> None:
    model = tiny_model("deepseek_v3", num_hidden_layers=6)
    before = [(name, type(module)) for name, module in model.named_modules()]
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    graph_of(Skeleton(model), pp=3, index=1, ep=4)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert [tuple(parameter.shape) for parameter in model.parameters()] == shapes
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


@pytest.mark.sweep
def test_stages_share_the_layers_of_the_whole() -> None:
    skeleton = Skeleton(tiny_model("deepseek_v3", num_hidden_layers=6))
    whole = graph_of(skeleton).graph.segments
    stages = [graph_of(skeleton, pp=3, index=index).graph.segments for index in range(3)]
    layers = [segment for segments in stages for segment in segments[:-1]]
    assert [segment.values for segment in layers] == [segment.values for segment in whole[:-1]]
    assert [segment.operators[0].site.name for segment in layers] == [f"model.layers.{i}" for i in range(6)]
    outside = [{operator.site.kind for operator in segments[-1].operators} for segments in stages]
    # In the place of the head the first stages have something that does nothing.
    assert outside == [{"lm_head"}, {"lm_head"}, {"final_norm", "lm_head", "loss"}]
    assert all(not any(value.savers for value in segments[-1].values if value.owner >= 0) for segments in stages[:2])


def test_imbalance_scales_the_experts_alone() -> None:
    graph = graph_of(Skeleton(tiny_model("mixtral")))
    balanced, doubled = graph.graph, graph.with_imbalance(2.0)
    routed = sum(v.num_bytes for s in balanced.segments for v in s.values if v.is_routed and v.savers)
    assert routed > 0
    assert sum(held_by_kind(doubled).values()) == sum(held_by_kind(balanced).values()) + routed


def test_a_rank_under_expert_parallelism_has_its_share_of_the_gradients() -> None:
    skeleton = Skeleton(tiny_model("mixtral"))
    whole, shared = graph_of(skeleton), graph_of(skeleton, ep=4, dispatch="all_to_all")
    for one, other in zip(whole.graph.segments, shared.graph.segments, strict=True):
        # Sizes of activations follow the rows, not the experts; only counts per expert shrink.
        for mine, theirs in zip(one.values, other.values, strict=True):
            assert mine.num_bytes == theirs.num_bytes or (mine.num_bytes, theirs.num_bytes) == (8 * 4, 2 * 4)
        for mine, theirs in zip(one.operators, other.operators, strict=True):
            if mine.site.kind == "expert_up":  # the gradient of 2 experts' weights instead of 8
                assert (mine.backward_transient_bytes or 0) > (theirs.backward_transient_bytes or 0)
    assert whole.num_routed_pairs == shared.num_routed_pairs == 2 * 32 * 2


def test_counts_of_the_model() -> None:
    model = tiny_model("deepseek_v3")
    skeleton = Skeleton(model)
    assert (skeleton.num_layers, skeleton.num_experts, skeleton.num_chosen_experts) == (3, 8, 2)
    assert skeleton.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    weights = skeleton.weights()
    assert sum(weight.is_expert for weight in weights) == 4  # two matrices in each of two routed layers
    assert [weight.shape for weight in weights if weight.is_embedding] == [(384, 32)]
    assert {weight.layer for weight in weights} == {-1, 0, 1, 2}


def test_autocast_is_traced() -> None:
    skeleton = Skeleton(tiny_model("llama"))
    stage = cut_into_stages(skeleton.num_layers, 1)[0]
    hardware = HARDWARE["h100"]
    halved = expand(
        skeleton, stage, trace_stage(skeleton, stage, 2, 32, Precision(torch.bfloat16, "bfloat16"), hardware)
    )
    plain = graph_of(skeleton)
    assert held_by_kind(halved.graph)["activation"] < held_by_kind(plain.graph)["activation"]
