"""Bytes of weights per rank, counted by hand."""

from __future__ import annotations

import pytest

from flex_trainer.errors import UserError
from flex_trainer.estimate.mesh import Mesh, Stage, cut_into_stages, make_mesh
from flex_trainer.estimate.optimizers import Optimizer, optimizer
from flex_trainer.estimate.weights import Weight, local_shape, of_stage, rank_weights

ADAM = Optimizer(2)


def weight(shape: tuple[int, ...], layer: int, **facts: bool) -> Weight:
    return Weight(shape, 2, facts.pop("is_expert", False), facts.pop("is_trainable", True), layer, **facts)


# One dense and one routed layer; 4 experts. Two bytes an element.
EMBEDDING = weight((100, 8), -1, is_embedding=True)
DENSE = [weight((16, 8), layer) for layer in (0, 1)]
EXPERTS = weight((4, 6, 8), 1, is_expert=True)
HEAD = weight((100, 8), -1, is_head=True)
ALL = [EMBEDDING, *DENSE, EXPERTS, HEAD]
WHOLE = Stage(0, (0, 1), True, True)


def test_one_rank_holds_everything() -> None:
    rank = rank_weights(of_stage(ALL, WHOLE), Mesh(), ADAM, 1)
    num_elements = 800 + 2 * 128 + 192 + 800
    assert rank.num_parameters == num_elements
    assert rank.parameters_bytes == rank.gradients_bytes == 2 * num_elements
    assert rank.optimizer_bytes == 4 * num_elements
    assert rank.gathered_bytes == rank.buckets_bytes == 0
    assert rank.gradients.pending == {-1: 3200, 0: 256, 1: 256 + 384}
    assert rank.gradients.temporary == rank.reduction_bytes == {}


def test_experts_are_spread_then_cut() -> None:
    mesh = Mesh(4, fsdp=4, ep=2)
    assert mesh.efsdp == 2
    assert local_shape(EXPERTS, mesh) == (1, 6, 8)  # 2 of 4 experts, over 2 ranks
    assert local_shape(DENSE[0], mesh) == (4, 8)
    assert local_shape(EMBEDDING, mesh) == (25, 8)
    rank = rank_weights(ALL, mesh, ADAM, 1)
    assert rank.num_parameters == 200 + 2 * 32 + 48 + 200
    # Both layers whole (256 each, and 2 experts: 2 x 48 x 2 bytes), and the head from forward to backward.
    assert rank.gathered_bytes == 2 * 256 + 192 + 1600
    assert rank.are_gradients_sharded
    # In backward a unit's gradients are whole, and once more where they are sent; less the one being computed.
    assert rank.reduction_bytes == {0: 2 * 256 - 256, 1: 2 * (256 + 192) - 256, -1: 2 * 1600 - 1600}


def test_rows_that_do_not_divide_count_on_the_fullest_rank() -> None:
    assert local_shape(weight((7, 3), 0), Mesh(4, fsdp=4)) == (2, 3)
    assert local_shape(weight((4, 6, 8), 0, is_expert=True), Mesh(8, fsdp=8, ep=1)) == (1, 6, 8)


def test_gradients_wait_whole_under_accumulation() -> None:
    mesh = Mesh(4, fsdp=4, ep=2)
    rank = rank_weights(ALL, mesh, ADAM, 3)
    assert not rank.are_gradients_sharded
    assert rank.gradients_bytes == 2 * (800 + 2 * 128 + 2 * 48 + 800)  # all but the other ranks' experts
    assert rank.gradients.pending == {}
    assert rank.reduction_bytes == {0: 0, 1: 192, -1: 0}  # the last micro-batch's buffers
    # With replicas only the all-reduce waits.
    replicated = rank_weights(ALL, Mesh(8, fsdp=4, ep=2), ADAM, 3)
    assert replicated.are_gradients_sharded
    assert replicated.gradients_bytes == 2 * (200 + 2 * 32 + 48 + 200)


def test_data_parallelism_keeps_the_gradients_twice() -> None:
    rank = rank_weights(ALL, Mesh(2), ADAM, 1)
    assert rank.buckets_bytes == rank.gradients_bytes


def test_frozen_weights_have_no_gradients_or_state() -> None:
    rank = rank_weights([weight((10, 10), 0, is_trainable=False)], Mesh(), ADAM, 1)
    assert (rank.parameters_bytes, rank.gradients_bytes, rank.optimizer_bytes) == (200, 0, 0)


def test_stages() -> None:
    stages = cut_into_stages(7, 3)
    assert [stage.layers for stage in stages] == [(0, 1, 2), (3, 4), (5, 6)]
    assert [(stage.has_embedding, stage.has_head) for stage in stages] == [(True, False), (False, False), (False, True)]
    first, last = Stage(0, (0,), True, False), Stage(1, (1,), False, True)
    assert of_stage(ALL, first) == [EMBEDDING, DENSE[0]]
    assert of_stage(ALL, last) == [DENSE[1], EXPERTS, HEAD]
    tied = weight((100, 8), -1, is_embedding=True, is_head=True)
    assert tied in of_stage([tied], first) and tied in of_stage([tied], last)


def test_mesh() -> None:
    mesh = make_mesh(8, 4, 2, 32, num_experts=16, num_layers=4)
    assert (mesh.dp_replicate, mesh.efsdp, mesh.num_batches) == (2, 2, 16)
    assert make_mesh(8, 4, 2, None, 16, 4).num_ranks == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 1, 2, 24, 16, 4), "fsdp=8 x pp=2 is 16 ranks, which does not divide the 24"),
        ((8, 3, 1, None, 9, 4), "ep=3 does not divide fsdp=8"),
        ((8, 8, 1, None, 12, 4), "ep=8 does not divide the 12 experts"),
        ((8, 2, 1, None, 0, 4), "no routed experts"),
        ((1, 1, 5, None, 0, 4), "pp=5 is more than the model's 4 layers"),
    ],
)
def test_meshes_that_cannot_be(arguments: tuple, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_mesh(*arguments)


@pytest.mark.parametrize(
    ("name", "shape", "num_bytes"),
    [
        ("adamw_torch_fused", (10, 10), 400),
        ("sgd", (10, 10), 0),
        ("adafactor", (10, 20), 120),  # a row and a column of float32
        ("adafactor", (3, 10, 20), 3 * 120),
        ("adafactor", (10,), 40),
        ("adamw_bnb_8bit", (10, 10), 800),  # small: float32
        ("adamw_bnb_8bit", (64, 128), 2 * (8192 + 32 * 4)),
        ("lion_8bit", (64, 128), 8192 + 32 * 4),
    ],
)
def test_optimizer_state(name: str, shape: tuple[int, ...], num_bytes: int) -> None:
    assert optimizer(name).state_bytes(shape, 2) == num_bytes


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(UserError, match=r"training.optim='adamw_torch_fusd'.*did you mean 'adamw_torch_fused'"):
        optimizer("adamw_torch_fusd")
