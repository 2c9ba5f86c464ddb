"""Traces of models that FSDP2 has sharded, with adapters around them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flex_trainer.config import FlexConfig
from flex_trainer.models.sharding import gathered_bytes
from flex_trainer.runtime import FlexRuntime
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter
from tests.tiers import first_quick

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    """One rank is enough for a model to be one of FSDP2's."""
    store = torch.distributed.HashStore()  # type: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def sharded(architecture: str, policy: MixedPrecisionPolicy | None = None) -> Any:
    model: Any = tiny_model(architecture, num_hidden_layers=2)
    mesh, policy = init_device_mesh("cpu", (1,)), policy or MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=replace(policy, output_dtype=None))  # else the head would refuse it
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def with_adapters(model: Any, target_parameters: list[str] | None = None) -> Any:
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], target_parameters=target_parameters, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, config)


def first_record(model: Any) -> Any:
    runtime = FlexRuntime(FlexConfig(BASE_BYTES + 500_000_000))
    with_fake_meter(runtime)
    runtime.attach(model)
    batch = tiny_batch(model, 2, 16)
    with runtime.backward():
        model(**batch).loss.backward()
    runtime.detach()
    return runtime.records[0]


@pytest.mark.parametrize(
    ("architecture", "target_parameters"),
    [("llama", None), ("gpt_oss", ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])],
)
def test_adapters_around_a_sharded_model(architecture: str, target_parameters: list[str] | None) -> None:
    record = first_record(with_adapters(sharded(architecture), target_parameters))
    assert not record.is_profile
    assert record.predicted_bytes == record.actual_bytes > 0


@pytest.mark.filterwarnings("ignore:gradient checkpointing is on")
def test_torchs_wrappers_around_units() -> None:
    model = sharded("llama")
    layers = set(model.model.layers)
    apply_activation_checkpointing(model, check_fn=lambda module: module in layers)
    record = first_record(model)
    assert not record.is_profile
    assert record.predicted_bytes == record.actual_bytes > 0


POLICIES = {
    "as in recipes": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "outputs in float32": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
    "inputs as they are": MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False),
}


@pytest.mark.parametrize("architecture", first_quick(["qwen3_moe", "llama"]))
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_weights_are_gathered_in_another_dtype_than_stored(architecture: str, policy: MixedPrecisionPolicy) -> None:
    record = first_record(sharded(architecture, policy))
    assert not record.is_profile
    assert record.predicted_bytes == record.actual_bytes > 0
    assert record.actual_bytes < first_record(sharded(architecture)).actual_bytes


def test_what_is_gathered_counts_in_the_dtype_it_is_gathered_in() -> None:
    """Of the largest unit weights, gradients and the buffer that these are sent from, of the next one weights."""
    model = sharded("llama", MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    layer, own = (
        sum(parameter.numel() for parameter in module.parameters()) for module in (model.model.layers[0], model)
    )
    own -= 2 * layer
    first, second = sorted([layer, layer, own])[:0:-1]
    assert gathered_bytes(model) == (2 + 2 + 4) * first + 2 * second
    assert gathered_bytes(sharded("llama")) == 3 * 4 * first + 4 * second
