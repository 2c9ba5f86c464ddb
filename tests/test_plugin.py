"""FlexPlugin in a plain Accelerate loop: the same weights, and an accelerator given back as it was."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from flex_trainer import FlexConfig, FlexPlugin
from flex_trainer.errors import UserError
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter

pytestmark = pytest.mark.usefixtures("deterministic")


def accelerator() -> Accelerator:
    return Accelerator(cpu=True, gradient_accumulation_steps=2)


def train(plugin: FlexPlugin | None) -> tuple[PreTrainedModel, list[float], list[int]]:
    """Six micro-batches, three optimizer steps. Returns the model, the losses, and the plugin's step at each."""
    model = tiny_model("mixtral")
    batches = [tiny_batch(model, 2, (64, 48, 56)[number % 3], seed=number) for number in range(6)]
    engine = accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    prepared, optimizer, loader = engine.prepare(model, optimizer, loader)
    if plugin is not None:
        plugin.attach(engine)
    losses, steps = [], []
    for batch in loader:
        with engine.accumulate(prepared):
            loss = prepared(**batch).loss
            steps.append(plugin.runtime.step if plugin is not None else 0)
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if plugin is not None:
        plugin.detach()
        assert "backward" not in vars(engine)
    return model, losses, steps


def test_loop_with_accumulation_equals_the_plain_loop() -> None:
    plugin = FlexPlugin(FlexConfig(BASE_BYTES + 1_450_000))
    with_fake_meter(plugin.runtime)
    model, losses, steps = train(plugin)
    reference, expected, _ = train(None)
    assert losses == expected
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, reference.state_dict()[name]), name
    records = plugin.runtime.records
    assert steps == [record.step for record in records] == [0, 0, 1, 1, 2, 2]
    assert any(sum(record.freed_bytes.values()) > 0 for record in records if not record.is_profile)


def test_detach_restores_model_and_accelerator() -> None:
    engine = accelerator()
    model = engine.prepare(tiny_model("mixtral"))
    plugin = FlexPlugin(FlexConfig(10**9))
    with_fake_meter(plugin.runtime)
    runtime = plugin.attach(engine)
    assert plugin.is_attached and runtime is plugin.runtime
    assert "backward" in vars(engine) and "forward" in vars(model)
    plugin.detach()
    assert not plugin.is_attached
    assert "backward" not in vars(engine)
    assert all("forward" not in vars(module) for module in model.modules())
    plugin.detach()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_plugins_on_one_accelerator_detach_in_any_order(order: tuple[int, int]) -> None:
    engine = accelerator()
    models = engine.prepare(tiny_model("llama"), tiny_model("llama"))
    plugins = [FlexPlugin(FlexConfig(10**9)) for _ in models]
    for plugin, model in zip(plugins, models, strict=True):
        with_fake_meter(plugin.runtime)
        plugin.attach(engine, model)

    def step(model: PreTrainedModel) -> None:
        engine.backward(model(**tiny_batch(model, 2, 16)).loss)

    for model in models:
        step(model)
    assert [len(plugin.runtime.records) for plugin in plugins] == [1, 1]
    first, last = order
    plugins[first].detach()
    assert "backward" in vars(engine)
    for model in models:
        step(model)
    assert len(plugins[first].runtime.records) == 1 and len(plugins[last].runtime.records) == 2
    plugins[last].detach()
    assert "backward" not in vars(engine)
    assert all("forward" not in vars(module) for model in models for module in model.modules())
    step(models[0])


def test_no_model_or_several_models_must_be_named() -> None:
    engine = accelerator()
    plugin = FlexPlugin(FlexConfig(10**9))
    with_fake_meter(plugin.runtime)
    with pytest.raises(ValueError, match=r"has prepared 0 models; call attach after accelerator.prepare, or name"):
        plugin.attach(engine)
    first, second = engine.prepare(tiny_model("llama"), tiny_model("llama"))
    with pytest.raises(ValueError, match=r"has prepared 2 models"):
        plugin.attach(engine)
    assert not plugin.is_attached
    plugin.attach(engine, second)
    assert "forward" in vars(second) and "forward" not in vars(first)
    plugin.detach()


def test_attach_that_fails_leaves_the_accelerator_alone() -> None:
    engine = accelerator()
    engine.prepare(tiny_model("llama"))
    plugin = FlexPlugin(FlexConfig(BASE_BYTES // 2))
    with_fake_meter(plugin.runtime)
    with pytest.raises(ValueError, match=r"memory_limit=500000"):
        plugin.attach(engine)
    assert not plugin.is_attached and "backward" not in vars(engine)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_engines_that_own_the_weights_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = accelerator()
    model = engine.prepare(tiny_model("llama", num_hidden_layers=1))
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType[kind])
    plugin = FlexPlugin(FlexConfig(BASE_BYTES + 10**9))
    with pytest.raises(UserError, match=rf"distributed_type={kind}.*FSDP2.*ep_implementation=\"flex\"") as caught:
        plugin.attach(engine)
    assert "DeepSpeed" in str(caught.value) and not plugin.is_attached
    assert "backward" not in vars(engine) and "forward" not in vars(model)
