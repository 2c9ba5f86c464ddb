"""A step that runs out of memory is rolled back and retried; one that cannot be says why."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from flex_trainer import FlexConfig, FlexPlugin, FlexTrainer
from flex_trainer.memory.failed_allocation import is_out_of_memory, let_go, nearest_limit, requested_bytes
from flex_trainer.provision.margin import SafetyMargin
from flex_trainer.runtime import FlexRuntime
from flex_trainer.steps.transaction import Transaction
from flex_trainer.testing.failures import ASKED_BYTES, TEXT
from flex_trainer.testing.fake_meter import BASE_BYTES, with_fake_meter
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.once import Once
from tests.runtime_steps import assert_equal, attached, detach_all, gradients, loss_of, plain_gradients
from tests.trainer_runs import LIMIT_BYTES, Batches, assert_same_run, make

AMPLE = FlexConfig(BASE_BYTES + 50_000_000)


def transaction(config: FlexConfig = AMPLE) -> tuple[Transaction, PreTrainedModel, FlexRuntime]:
    model = tiny_model("llama", num_hidden_layers=1)
    runtime = attached(model, config)
    return Transaction(runtime), model, runtime


# What an allocation failure is


def test_failed_allocations_are_recognised() -> None:
    failing: list[Callable[[], Any]] = [
        lambda: torch.empty(2**50),
        lambda: np.empty(10**15),
        lambda: bytearray(10**15),
        lambda: _raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")),
        lambda: _raise(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))),
        lambda: _raise(RuntimeError("std::bad_alloc")),
        lambda: _raise(RuntimeError("can't start new thread")),
        lambda: _raise(RuntimeError("unable to mmap 64 bytes from file </x>: Cannot allocate memory (12)")),
        lambda: _raise(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")),
    ]
    for fail in failing:
        with pytest.raises(Exception) as caught:
            fail()
        assert is_out_of_memory(caught.value), caught.value


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
        RuntimeError("unable to mmap 64 bytes from file </x>: Permission denied (13)"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        ValueError("can't allocate memory: you tried to allocate 5 bytes"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_not(error: BaseException) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (TEXT, ASKED_BYTES),
        ("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has a total capacity of 79.11 GiB", 21495808),
        ("Unable to allocate 7.00 KiB for an array with shape (7, 128)", 7168),
        ("std::bad_alloc", 0),
    ],
)
def test_the_request_is_read_from_the_message(text: str, num_bytes: int) -> None:
    assert requested_bytes(RuntimeError(text)) == num_bytes


def test_letting_go_of_an_error_frees_what_its_frames_held() -> None:
    alive: list[Any] = []

    class Big:
        def __del__(self) -> None:
            alive.clear()

    def fail() -> None:
        big = Big()
        alive.append(1)
        try:
            raise KeyError(str(big))
        except KeyError:
            raise RuntimeError(TEXT) from None

    try:
        fail()
    except RuntimeError as error:
        assert alive
        let_go(error)
        assert not alive and error.__traceback__ is None


def test_nearest_limit_names_the_least_of_them() -> None:
    limit = nearest_limit(torch.device("cpu"))
    assert limit.name.startswith("the ") and 0 < limit.left_bytes <= limit.num_bytes
    assert str(limit).startswith(limit.name)


# The margin


def test_margin_grows_by_the_request_or_a_share_and_is_bounded() -> None:
    margin = SafetyMargin()
    margin.widen(0, 1_000_000)
    assert margin.num_bytes == 30_000
    margin.widen(100_000, 1_000_000)
    assert margin.num_bytes == 130_000
    margin.widen(10**9, 1_000_000)
    assert margin.num_bytes == 500_000


def test_one_spike_is_forgotten_and_a_lasting_cause_is_remembered_longer() -> None:
    margin = SafetyMargin()
    margin.widen(0, 1_000_000)
    for _ in range(64):
        margin.relax(1_000_000)
    assert margin.num_bytes == pytest.approx(15_000, abs=2)
    for _ in range(300):
        margin.relax(1_000_000)
    assert margin.num_bytes == 0
    margin.widen(0, 1_000_000)
    assert margin.half_life == 64  # the earlier one was forgotten: it has nothing to do with this one
    # A cause that needs 2% for good: failures become ever rarer.
    num_passed, gaps = 0, []
    for _ in range(4000):
        margin.relax(1_000_000)
        num_passed += 1
        if margin.num_bytes < 20_000:
            gaps.append(num_passed)
            num_passed = 0
            margin.widen(0, 1_000_000)
    assert gaps == sorted(gaps) and gaps[-1] > 8 * gaps[0]


def test_margin_is_kept_back_from_plans_and_saved(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    config = FlexConfig(LIMIT_BYTES, transient_reserve=0, seed_profile=str(path))
    step, model, runtime = transaction(config)
    fail = Once()

    def forward_and_backward() -> None:
        loss = loss_of(model, length=16)
        fail()
        with runtime.backward():
            loss.backward()

    step.run_micro_batch(forward_and_backward)
    assert runtime.margin_bytes > 0.98 * ASKED_BYTES
    record, retry = runtime.records[-1], runtime.retries[-1]
    assert retry.margin_bytes == ASKED_BYTES and retry.phase == "forward" and retry.attempt == 1
    assert record.budget_bytes < LIMIT_BYTES - BASE_BYTES - 0.98 * ASKED_BYTES
    runtime.detach()
    later = FlexRuntime(config)
    with_fake_meter(later)
    later.attach(tiny_model("llama", num_hidden_layers=1))
    assert later.margin_bytes == runtime.margin_bytes
    later.detach()


# Taking back


def test_gradients_buffers_random_streams_and_arguments_are_put_back() -> None:
    step, model, runtime = transaction()
    rotary = next(module for module in model.modules() if module._buffers)
    name, buffer = next(iter(rotary._buffers.items()))
    assert buffer is not None
    weight = next(model.parameters())
    before = buffer.clone()
    seen: list[tuple[float, list[str], bool]] = []
    fail = Once()

    def function(inputs: dict[str, int]) -> int:
        seen.append((float(torch.rand(())), sorted(inputs), weight.grad is None))
        inputs.pop("labels")
        buffer.add_(1)
        rotary.longest = 5  # type: ignore[assignment]
        weight.grad = torch.ones_like(weight)
        fail()
        rotary._buffers[name] = buffer + 1
        return len(seen)

    assert step.run_micro_batch(function, {"labels": 1, "input_ids": 2}) == 2
    assert seen[0] == seen[1] == (seen[0][0], ["input_ids", "labels"], True)
    bound = rotary._buffers[name]
    assert bound is not None and torch.equal(bound, before + 2)
    assert len(runtime.retries) == 1
    del rotary._buffers[name]
    rotary._buffers[name] = buffer


def test_what_changes_between_micro_batches_is_as_it_was_at_each() -> None:
    step, model, _ = transaction()
    layer: Any = model.model.layers[0]
    weight = next(model.parameters())
    layer.scale, layer.calls = 1.0, 0
    seen: list[tuple[float, int, list[list[int]]]] = []
    fail = Once(num_failures=0)

    def function(inputs: dict[str, list[list[int]]], is_last: bool) -> None:
        layer.calls += 1
        seen.append((layer.scale, layer.calls, [list(row) for row in inputs["rows"]]))
        inputs["rows"][0].append(9)
        weight.grad = torch.ones_like(weight) if weight.grad is None else weight.grad + 1
        if is_last:
            fail()

    step.run_micro_batch(function, {"rows": [[1], [2]]}, False)
    layer.scale = 3.0  # a callback, say
    fail.num_left = 1
    step.run_micro_batch(function, {"rows": [[3]]}, True)
    assert seen == [(1.0, 1, [[1], [2]]), (3.0, 2, [[3]])] * 2
    assert (layer.scale, layer.calls) == (3.0, 2)


def test_earlier_micro_batches_of_the_step_run_again_and_only_those() -> None:
    step, model, _ = transaction()
    weight = next(model.parameters())
    ran: list[str] = []
    fail = Once(num_failures=0)

    def function(name: str) -> str:
        ran.append(name)
        weight.grad = torch.ones_like(weight) if weight.grad is None else weight.grad + 1
        if name == "d":
            fail()
        return name

    assert [step.run_micro_batch(function, name) for name in "ab"] == ["a", "b"]
    weight.grad = None  # the optimizer has stepped
    fail.num_left = 2
    assert [step.run_micro_batch(function, name) for name in "cd"] == ["c", "d"]
    assert "".join(ran) == "ab" + "cd" + "cd" + "cd"
    assert weight.grad is not None and float(weight.grad.flatten()[0]) == 2


def test_obstacles_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    step, model, runtime = transaction()
    weight = next(model.parameters())

    def message_of(function: Callable[..., Any], *args: Any, run: Transaction = step) -> str:
        with pytest.raises(RuntimeError, match="tried to allocate") as caught:
            run.run_micro_batch(function, *args)
        assert not runtime.retries
        return "\n".join(caught.value.__notes__)

    weight.grad = torch.zeros_like(weight)
    assert "gradients existed when the step began" in message_of(Once())
    weight.grad = None

    def stepping() -> None:
        with torch.no_grad():
            weight.add_(0)
        raise RuntimeError(TEXT)

    assert "parameters have changed" in message_of(stepping)

    handle = weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert "an optimizer that runs in backward" in message_of(Once())
    handle.remove()

    def writing(tensor: torch.Tensor) -> None:
        tensor.add_(1)
        raise RuntimeError(TEXT)

    assert "an input was changed in place" in message_of(writing, torch.zeros(2))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert "it is one of 2 processes" in message_of(Once())
    monkeypatch.undo()
    detach_all()
    watching, _, runtime = transaction(FlexConfig(AMPLE.memory_limit, strategies=()))
    assert "strategies is empty" in message_of(Once(), run=watching)


@pytest.mark.parametrize("reason", ["several processes", "no strategies"])
def test_nothing_is_prepared_where_no_step_can_be_rolled_back(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, _, runtime = transaction(
        FlexConfig(AMPLE.memory_limit, strategies=() if reason == "no strategies" else ("recompute",))
    )
    if reason == "several processes":
        monkeypatch.setattr("flex_trainer.steps.transaction.num_ranks", lambda: 2)

    def refuse(*_: Any) -> None:
        raise AssertionError("prepared")

    for name in ("ModuleValues", "RandomStreams"):
        monkeypatch.setattr(f"flex_trainer.steps.transaction.{name}", refuse)
    assert step.run_micro_batch(lambda: (5, runtime.can_roll_back)) == (5, False)


def test_the_micro_batches_of_a_step_share_what_has_not_changed() -> None:
    step, model, _ = transaction()
    layer: Any = model.model.layers[0]
    weight = next(model.parameters())
    layer.calls = 0

    def function() -> None:
        layer.calls += 1
        weight.grad = torch.ones_like(weight) if weight.grad is None else weight.grad + 1

    for _ in range(4):
        step.run_micro_batch(function)
    assert step._step is not None
    first, *others = [call.modules for call in step._step.calls]
    assert len(others) == 3 and all(one._base is first._base for one in others)
    assert [[record.module for record in one._changed.values()] for one in others] == [[layer]] * 3


def test_gradients_of_what_only_the_optimizer_knows_are_taken_back_too() -> None:
    _, model, runtime = transaction()
    head = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([*model.parameters(), head], lr=1.0)
    step = Transaction(runtime, optimizers=lambda: [optimizer])
    fail = Once()

    def function(factor: float) -> None:
        (head * factor).backward()
        if factor == 3.0:
            fail()

    for factor in (2.0, 3.0):
        step.run_micro_batch(function, factor)
    assert len(runtime.retries) == 1
    assert head.grad is not None and float(head.grad) == 5.0


def test_other_errors_pass_untouched() -> None:
    step, _, runtime = transaction()
    error = KeyError("labels")
    with pytest.raises(KeyError) as caught:
        step.run_micro_batch(Once(make_error=lambda: error))
    assert caught.value is error and not hasattr(error, "__notes__") and not runtime.retries
    with pytest.raises(RuntimeError, match="CUDA error: device-side assert"):
        step.run_micro_batch(Once(make_error=lambda: RuntimeError("CUDA error: device-side assert triggered")))


# Counters


# A plain Accelerate loop


def train(plugin: FlexPlugin | None, fail: Once | None, *, set_to_none: bool = True) -> PreTrainedModel:
    model = tiny_model("llama", num_hidden_layers=1)
    engine = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared, optimizer = engine.prepare(model, optimizer)
    if plugin is not None:
        plugin.attach(engine)

    def forward_and_backward(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = prepared(**batch).loss
        if fail is not None and engine.sync_gradients:
            fail()
        engine.backward(loss)
        return loss.detach()

    run: Any = forward_and_backward if plugin is None else lambda batch: plugin.run(forward_and_backward, batch)
    for number in range(4):
        with engine.accumulate(prepared):
            run(tiny_batch(model, 2, 16, seed=number))
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    if plugin is not None:
        plugin.detach()
    return model


def test_plugin_runs_a_step_again() -> None:
    plugin = FlexPlugin(AMPLE)
    with_fake_meter(plugin.runtime)
    ours, theirs = train(plugin, Once()).state_dict(), train(None, None).state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert [record.step for record in plugin.runtime.records] == [0, 0, 1, 1]
    (retry,) = plugin.runtime.retries
    assert (retry.step, retry.micro_batch) == (0, 1)


def test_plugin_says_what_gradients_of_zeros_prevent() -> None:
    plugin = FlexPlugin(AMPLE)
    with_fake_meter(plugin.runtime)
    fail = Once(num_failures=0)

    def later() -> None:
        if len(plugin.runtime.records) == 3:
            raise RuntimeError(TEXT)

    fail.__class__ = type("Later", (Once,), {"__call__": lambda self: later()})
    with pytest.raises(RuntimeError, match="tried to allocate") as caught:
        train(plugin, fail, set_to_none=False)
    assert "zero_grad(set_to_none=True)" in caught.value.__notes__[0]
    plugin.detach()


# Evaluation


class FailingEvaluation(FlexTrainer):
    """Evaluation runs out of memory in its second batch; the user goes on."""

    num_failed = 0

    def prediction_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().prediction_step(model, *args, **kwargs)
        self.num_batches = getattr(self, "num_batches", 0) + 1
        if self.num_batches % 2 == 0:
            raise RuntimeError(TEXT)
        return result

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().evaluate(*args, **kwargs)
        except RuntimeError as error:
            assert is_out_of_memory(error) and not hasattr(error, "__notes__")
            self.num_failed += 1
            return {}


def test_evaluation_that_fails_leaves_training_alone(tmp_path: Path) -> None:
    plain = make(tmp_path, None, max_steps=2)
    plain.train()
    trainer = make(
        tmp_path,
        FlexConfig(LIMIT_BYTES),
        trainer_class=FailingEvaluation,
        options={"eval_dataset": Batches()},
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
    )
    trainer.train()
    assert trainer.num_failed >= 2 and not trainer.flex.retries and trainer.flex.margin_bytes == 0
    assert_same_run(trainer, plain)
    assert [record.micro_batch for record in trainer.flex.records] == list(range(4))


# Two forwards before one backward


def test_two_forwards_share_the_budget_once_it_is_known() -> None:
    model = tiny_model("mixtral")
    runtime = attached(model, FlexConfig(BASE_BYTES + 2_600_000, ("recompute",), transient_reserve=0))
    step = Transaction(runtime)

    def both() -> None:
        loss = loss_of(model, 0) + loss_of(model, 1)
        with runtime.backward():
            loss.backward()

    expected = plain_gradients(0, 1)
    for number in range(3):
        step.run_micro_batch(both)
        assert_equal(gradients(model), expected)
        model.zero_grad()
        first, second = runtime.records[-2:]
        assert [first.micro_batch, second.micro_batch] == [2 * number, 2 * number + 1]
        assert first.demand_bytes + second.demand_bytes > 2_600_000
        assert max(first.peak_bytes, second.peak_bytes) <= runtime.limit_bytes
        for record in (first, second):
            assert record.predicted_bytes <= record.budget_bytes
            assert record.actual_bytes <= record.budget_bytes * 1.005
    # The first time, the first forward took all; the step was run again with memory shared out. Then it was known.
    assert [(retry.attempt, retry.phase, retry.step) for retry in runtime.retries] == [(0, "begin", 0)]
    assert runtime.margin_bytes == 0


def test_without_a_transaction_the_second_forward_runs_in_as_little_as_there_is() -> None:
    model, reference = tiny_model("mixtral"), tiny_model("mixtral")
    runtime = attached(model, FlexConfig(BASE_BYTES + 2_600_000, ("recompute",), transient_reserve=0))
    losses = [loss_of(model, 0), loss_of(model, 1)]
    with runtime.backward():
        torch.stack(losses).sum().backward()
    torch.stack([loss_of(reference, 0), loss_of(reference, 1)]).sum().backward()
    assert_equal(gradients(model), gradients(reference))
    assert runtime.records[1].actual_bytes < runtime.records[0].actual_bytes
