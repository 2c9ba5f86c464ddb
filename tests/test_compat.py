"""Each private name of the libraries below does what we take it to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import parametrize

from flex_trainer.compat import (
    allocator_settings,
    current_backward,
    fsdp_groups,
    fsdp_pass_state,
    fsdp_policy,
    hooks_of_all_modules,
    is_in_backward,
    keeps_graph,
    made_parametrizations,
    parametrizations_are_made,
    place_of_fsdp_parameter,
    prepared_models,
    prepared_optimizers,
    top_pack_hook,
    when_backward_ends,
)
from flex_trainer.testing.processes import run_in_subprocess


class Asking(torch.autograd.Function):
    """The identity; asks in backward."""

    seen: list[tuple[str, int, bool]] = []

    @staticmethod
    def forward(ctx, x):  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        number = current_backward()
        Asking.seen.append(("begun", number, keeps_graph()))
        when_backward_ends(lambda: Asking.seen.append(("ended", number, x.grad is not None)))
        return gradient


x = torch.ones(2, requires_grad=True)


def test_begin_and_end_of_a_backward_are_told() -> None:
    Asking.seen.clear()
    x.grad = None
    assert current_backward() == -1
    loss = Asking.apply(x).sum()
    loss.backward(retain_graph=True)
    assert [event for event, *_ in Asking.seen] == ["begun", "ended"]
    (_, first, is_kept), (_, same, has_gradient) = Asking.seen
    assert first == same >= 0 and is_kept and has_gradient  # it has ended: gradients are there
    loss.backward()
    assert Asking.seen[2][1] != first and Asking.seen[2][2] is False
    assert current_backward() == -1


def test_outside_of_a_backward_there_is_no_end_to_wait_for() -> None:
    with pytest.raises(RuntimeError):
        when_backward_ends(lambda: None)


class Asks(torch.autograd.Function):
    """The identity; its backward notes whether it knows that it is one."""

    answers: list[bool] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Asks.answers.append(is_in_backward())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Asks.answers.append(is_in_backward())
        return gradients[0]


def test_a_backward_is_told_from_a_forward() -> None:
    Asks.answers.clear()
    result: Any = Asks.apply(torch.ones(2, requires_grad=True))
    result.sum().backward()
    assert Asks.answers == [False, True] and not is_in_backward()


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_what_cached_parametrizations_hold_is_read_and_exchanged() -> None:
    linear = nn.Linear(2, 2)
    parametrize.register_parametrization(linear, "weight", Twice())
    assert made_parametrizations() == (0, {})
    with parametrize.cached():
        weight = linear.weight
        num_caching, made = made_parametrizations()
        assert num_caching == 1 and made[id(linear), "weight"] is weight
        with parametrizations_are_made(0, {}):
            assert linear.weight is not weight
        assert linear.weight is weight
    other = torch.ones(2, 2)
    with parametrizations_are_made(1, {(id(linear), "weight"): other}):
        assert linear.weight is other
    assert made_parametrizations() == (0, {})


def test_the_innermost_pack_hook_is_seen() -> None:
    def outer(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert top_pack_hook() is None
    with saved_tensors_hooks(outer, outer):
        assert top_pack_hook() is outer


def test_hooks_of_all_modules_are_listed() -> None:
    def hook(module: nn.Module, *_: object) -> None: ...

    handle = nn.modules.module.register_module_forward_hook(hook)
    assert hooks_of_all_modules() == [hook]
    handle.remove()


def test_an_accelerator_lists_what_it_has_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    assert prepared_models(accelerator) == [] and prepared_optimizers(accelerator) == []
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    assert prepared_models(accelerator) == [model] and prepared_optimizers(accelerator) == [optimizer]
    accelerator.free_memory()


def test_a_unit_tells_its_own_parameters_and_its_policy(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        inner = fully_shard(model[0], mesh=mesh)
        outer = fully_shard(model, mesh=mesh, mp_policy=policy)
        places = [
            [place_of_fsdp_parameter(one) for group in fsdp_groups(unit) for one in group.fsdp_params]
            for unit in (inner, outer)
        ]
        assert places == [[(model[0], "weight"), (model[0], "bias")], [(model[1], "weight")]]
        assert fsdp_policy(outer) == policy
        assert all(group.post_forward_mesh_info is not None for group in fsdp_groups(inner))
    finally:
        dist.destroy_process_group()


def test_what_fsdp_notes_of_a_pass_is_exchanged(tmp_path: Path) -> None:
    """A forward that is half way is put aside, another one runs whole with its backward, and the first goes on."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        fully_shard(model[1], mesh=init_device_mesh("cpu", (1,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model(torch.ones(1, 2)).sum().backward()  # FSDP2 looks itself up in the first forward
        passes = fsdp_pass_state(model)
        assert len(passes.groups) == 2
        found: list[list[bool]] = []

        def other(*_: object) -> None:
            handle.remove()
            waiting = passes.waiting([(False, False)] * 2)
            passes.begin_forward()
            taken = passes.taken()
            found.append([passes.is_inside(taken, number) for number in range(2)])
            passes.put(waiting)
            found.append([passes.is_inside(passes.taken(), number) for number in range(2)])
            assert passes.gradient_flags() == [(False, False)] * 2
            assert [passes.gather_under_way(group) for group in passes.groups] == [[], []]
            passes.put(taken)
            found.append([passes.is_inside(passes.taken(), number) for number in range(2)])
            assert passes.gradient_flags() == [(True, True)] * 2

        handle = model[0].register_forward_hook(other)
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert found == [[True, False], [False, False], [True, False]]
        assert all(parameter.grad is not None for parameter in model.parameters())
    finally:
        dist.destroy_process_group()


def child_reads_settings() -> str:
    return allocator_settings()


def test_settings_of_the_allocator_are_what_the_environment_says() -> None:
    result = run_in_subprocess(
        f"{__name__}:child_reads_settings", env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    )
    assert result.exit_code == 0 and result.value == "expandable_segments:True", result.stderr
