"""A model is taken and given back whole, whatever goes wrong on the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from flex_trainer.config import FlexConfig
from flex_trainer.errors import UserError
from flex_trainer.runtime import FlexRuntime
from flex_trainer.testing.tiny import tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter
from tests.runtime_steps import (
    LIMIT_BYTES,
    assert_equal,
    attached,
    gradients,
    loss_of,
    plain_gradients,
    step,
)


def test_detach_gives_the_model_back(model: PreTrainedModel) -> None:
    runtime = attached(model)
    step(runtime, model)
    assert "get_interface" in vars(ALL_ATTENTION_FUNCTIONS)
    runtime.detach()
    assert not runtime.is_attached and len(runtime.records) == 1
    assert all("forward" not in vars(module) for module in model.modules())
    assert "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)
    assert "get_interface" not in vars(ALL_EXPERTS_FUNCTIONS)
    loss_of(model, 1).backward()
    assert_equal(gradients(model), plain_gradients(1))
    assert len(runtime.records) == 1
    runtime.detach()  # twice does no harm
    runtime.attach(model)
    assert_equal(step(runtime, model, 2), plain_gradients(2))
    assert not runtime.records[1].is_profile  # what was learnt stays
    runtime.detach()


def test_detach_learns_what_a_backward_outside_of_the_context_left(model: PreTrainedModel) -> None:
    runtime = attached(model)
    unfinished = loss_of(model, 1)
    loss_of(model).backward()
    assert runtime.records == [] and len(runtime.in_flight) == 2
    runtime.detach()
    assert [record.micro_batch for record in runtime.records] == [1] and runtime.in_flight == []
    assert not runtime.books.activities.is_any_at_work
    unfinished.backward()  # its values are still there
    assert len(runtime.records) == 1


def test_detach_that_cannot_write_the_profile_has_detached(model: PreTrainedModel, tmp_path: Path) -> None:
    directory = tmp_path / "profiles"
    directory.mkdir()
    runtime = attached(model, FlexConfig(LIMIT_BYTES, seed_profile=str(directory / "profile.json")))
    step(runtime, model)
    directory.rmdir()
    directory.write_text("no directory any more")
    with pytest.raises(ValueError, match="the seed profile cannot be written"):
        runtime.detach()
    assert not runtime.is_attached and len(runtime.records) == 1
    assert all("forward" not in vars(module) for module in model.modules())
    runtime.detach()


def test_only_the_main_process_writes_the_profile(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    for rank, is_main in ((1, False), (0, True)):
        monkeypatch.setattr("flex_trainer.provision.part.this_rank", lambda rank=rank: rank)
        runtime = attached(model, FlexConfig(LIMIT_BYTES, seed_profile=str(path)))
        step(runtime, model)
        runtime.detach()
        assert path.exists() is is_main


def test_one_model_at_a_time(model: PreTrainedModel) -> None:
    runtime = attached(model)
    with pytest.raises(RuntimeError, match=r"manages a model already; call detach\(\) first"):
        runtime.attach(model)
    runtime.detach()


def test_a_model_has_one_runtime_at_a_time(model: PreTrainedModel) -> None:
    runtime = attached(model)
    other = FlexRuntime(FlexConfig(LIMIT_BYTES))
    for part in (model, model.model):  # type: ignore[union-attr]
        with pytest.raises(
            UserError, match=r"this Mixtral\w+ is managed already \(its \S+, by another FlexPlugin.*detach"
        ):
            other.attach(part)
    assert not other.is_attached
    assert_equal(step(runtime, model, 1), plain_gradients(1))  # as if nothing had been asked
    runtime.detach()
    attached(model).detach()


def test_a_limit_above_the_machine_is_told_once(model: PreTrainedModel) -> None:
    for limit, strategies, num_told in ((10**9 + 1, ("recompute",), 1), (10**9, ("recompute",), 0), (2 * 10**9, (), 0)):
        runtime = FlexRuntime(FlexConfig(limit, strategies))
        with_fake_meter(runtime)  # of a device of 10**9 bytes
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                runtime.attach(model)
                runtime.detach()
        about = [str(one.message) for one in told if "memory_limit" in str(one.message)]
        assert len(about) == num_told
        assert all("is more than the 953.67 MiB of memory that this process can have" in text for text in about)


def test_a_seed_profile_that_cannot_be_written_is_refused_at_attach(model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(UserError, match="the seed profile cannot be written to"):
        attached(model, FlexConfig(LIMIT_BYTES, seed_profile=str(tmp_path / "file" / "profile.json")))
    runtime = attached(model, FlexConfig(LIMIT_BYTES, seed_profile=str(tmp_path / "made" / "profile.json")))
    assert (tmp_path / "made").is_dir(), "a directory that is missing is made"
    runtime.detach()


def test_before_attach_there_is_nothing_to_tell() -> None:
    runtime = FlexRuntime()
    assert runtime.limit_bytes == 0 and runtime.memory_now() == {} and not runtime.is_attached


def test_failed_attach_leaves_the_model_alone(model: PreTrainedModel) -> None:
    model.activation_checkpointing_enable()
    runtime = FlexRuntime(FlexConfig(BASE_BYTES // 2))
    with_fake_meter(runtime)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is said to be turned off either
        with pytest.raises(ValueError, match=r"memory_limit=500000 .* is below"):
            runtime.attach(model)
    assert not runtime.is_attached and model.is_activation_checkpointing
    assert all("forward" not in vars(module) for module in model.modules())
    # Nor does one that fails on the way.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="checkpointing is on"):
            attached(model)
    assert model.is_activation_checkpointing
    assert all("forward" not in vars(module) for module in model.modules())


def test_checkpointing_is_off_while_attached(model: PreTrainedModel) -> None:
    model.activation_checkpointing_enable({"use_reentrant": True})
    functions = [module._gradient_checkpointing_func for module in model.model.layers]
    with pytest.warns(UserWarning, match="turns it off while it manages this model"):
        runtime = attached(model)
    assert not model.is_activation_checkpointing
    runtime.detach()
    assert all(module.gradient_checkpointing for module in model.model.layers)
    assert [module._gradient_checkpointing_func for module in model.model.layers] == functions


def test_sharded_models_are_refused_before_anything_is_changed(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Any) -> None:
        raise UserError("is sharded over ranks")

    monkeypatch.setattr("flex_trainer.provision.managed_model.refuse_unmanaged", refuse)
    model.activation_checkpointing_enable()
    runtime = FlexRuntime(FlexConfig(LIMIT_BYTES))
    with pytest.raises(ValueError, match="sharded"):
        runtime.attach(model)
    assert model.is_activation_checkpointing and runtime._books is None


def test_the_device_of_a_model_is_not_that_of_the_next(model: PreTrainedModel) -> None:
    runtime = FlexRuntime(FlexConfig("20GiB", ("recompute",)))
    runtime.attach(model)
    assert runtime.device.type == "cpu"
    runtime.detach()
    with pytest.raises(ValueError, match="on cpu and cuda devices, not on 'meta'"):
        runtime.attach(tiny_model("llama").to("meta"))  # type: ignore[arg-type]
    assert not runtime.is_attached and runtime.limit_bytes == 20 * 2**30


def test_malloc_is_asked_to_return_memory_while_something_is_managed_that_may_be_mitigated(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def hold() -> Callable[[], None]:
        calls.append("hold")
        return lambda: calls.append("let go")

    monkeypatch.setattr("flex_trainer.runtime.hold_memory_returned", hold)
    for strategies, expected in (((), []), (("recompute",), ["hold"])):
        runtime = attached(model, FlexConfig(LIMIT_BYTES, strategies))
        step(runtime, model)  # also the trace of the first micro-batch
        runtime.roll_back(runtime.mark())  # trims, and leaves the options alone
        assert calls == expected
        runtime.detach()
    assert calls == ["hold", "let go"]


def test_report(model: PreTrainedModel, tmp_path: Path) -> None:
    runtime = attached(model)
    step(runtime, model)
    runtime.detach()
    page = runtime.report(tmp_path / "report.html").read_text()
    assert "MixtralForCausalLM" in page and "recompute, offload" in page


def test_seed_profile_spares_the_profiling_micro_batch(model: PreTrainedModel, tmp_path: Path) -> None:
    config = FlexConfig(BASE_BYTES + 2_000_000, seed_profile=str(tmp_path / "profile.json"))
    runtime = attached(model, config)
    step(runtime, model)
    runtime.detach()
    assert (tmp_path / "profile.json").exists()
    again = attached(tiny_model("mixtral"), config)
    assert_equal(step(again, again.model, 1), plain_gradients(1))  # type: ignore[arg-type]
    assert not again.records[0].is_profile
    again.detach()
    with pytest.raises(ValueError, match=r"seed_profile=.* belongs to another model"):
        attached(tiny_model("qwen3_moe"), config)
