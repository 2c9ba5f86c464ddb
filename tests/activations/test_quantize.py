"""8 bits a value: the stated error bound, and what is left alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.quantize import QuantizedValue, dequantize_rows, quantize_rows
from flex_trainer.activations.scope import Scope
from flex_trainer.activations.storage_layout import StorageLayout
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.steps import ByFunction
from tests.tiers import examples

FORMATS = (torch.int8, torch.float8_e4m3fn)


def taken(tensor: torch.Tensor) -> bool:
    return QuantizedValue.shrinks(tensor) and QuantizedValue.is_finite(tensor)


def round_trip(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dequantize_rows(*quantize_rows(rows, dtype))


def stated_error(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bound of each element, from the module's docstring."""
    largest = rows.float().abs().amax(-1, keepdim=True)
    if dtype == torch.int8:
        return (largest / 254).expand_as(rows)
    smallest_subnormal = largest / 448 * 2.0**-9
    return torch.maximum(rows.float().abs() * 2.0**-4, smallest_subnormal / 2)


@examples(60)
@given(
    num_rows=st.integers(1, 5),
    num_columns=st.integers(1, 33),
    exponent=st.integers(-20, 30),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(FORMATS),
    original=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_error_is_within_the_stated_bound(num_rows, num_columns, exponent, seed, dtype, original):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, num_columns, generator=generator).exp() * 10.0**exponent
    rows = (rows * torch.where(torch.rand(rows.shape, generator=generator) < 0.5, -1, 1)).to(original)
    error = (round_trip(rows, dtype) - rows.float()).abs()
    assert (error <= stated_error(rows, dtype) * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_do_not_touch_each_other(dtype: torch.dtype):
    """An outlier in one row, zeros in another."""
    rows = torch.tensor([[1e9, 1.0, 2.0], [0.0, 0.0, 0.0], [1.0, -0.5, 0.25]])
    back = round_trip(rows, dtype)
    assert torch.equal(back[1], rows[1])
    torch.testing.assert_close(back[2], rows[2], rtol=0.07, atol=0.004)
    assert torch.isfinite(back).all()


def test_what_is_taken():
    assert all(taken(torch.ones(3, 50, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float16))
    others = (torch.int64, torch.bool, torch.float64, torch.complex64, torch.uint8)
    assert not any(taken(torch.ones(3, 50, dtype=dtype)) for dtype in others)
    whole = torch.ones(4, 6)
    # A part stands for its whole storage, as the halves of a gate-and-up product do.
    assert all(taken(part) for part in (whole.t(), whole[1:], whole[:, :3]))
    # Rows so short that codes and scales would take as much as the values.
    assert not taken(torch.ones(64, 2, dtype=torch.bfloat16))
    assert not taken(torch.tensor(1.0)) and not taken(torch.ones(0, 6))
    for value in (math.inf, -math.inf, math.nan):
        whole = torch.ones(4, 6)
        whole[2, 3] = value
        assert not taken(whole)
    # As many elements as the storage has, but not the same ones: the hidden one is not finite.
    assert not taken(torch.tensor([[1.0, math.inf]]).t().expand(2, 1)[:1].expand(2, 1))


def test_rows_are_those_of_the_tensor_that_was_seen_first():
    packed = torch.cat([torch.full((3, 8), 1e-3), torch.full((3, 8), 1e3)], dim=1)
    part = packed[:, :8].view(3, 2, 4)
    assert QuantizedValue(part, torch.int8, Ledger()).num_bytes == 48 + 4 * 12
    assert QuantizedValue(part, torch.int8, Ledger(), StorageLayout.of(packed)).num_bytes == 48 + 4 * 3
    # Another type of the same bytes has rows of its own.
    assert (
        QuantizedValue(packed.view(torch.float16), torch.int8, Ledger(), StorageLayout.of(packed)).num_bytes
        == 96 + 4 * 3
    )
    assert StorageLayout.of(torch.ones(5, 1)).num_rows(20) == 5
    assert (
        StorageLayout.of(torch.ones(5, 4, dtype=torch.int32)).num_rows(80)
        == StorageLayout.of(torch.ones(0, 4)).num_rows(0)
        == 0
    )


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(7,), (1, 1), (3, 5, 7), (2, 129)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_values_come_back_in_their_layout(dtype: torch.dtype, shape: tuple[int, ...], is_transposed: bool):
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if is_transposed:
        value = value.transpose(0, -1)
    ledger = Ledger()
    quantized = QuantizedValue(value, dtype, ledger)
    assert ledger.held_bytes == quantized.num_bytes
    assert ledger.freed_bytes["quantize"] == value.numel() * 4 - quantized.num_bytes
    back = quantized.read().as_strided(value.size(), value.stride())
    torch.testing.assert_close(back, value, rtol=0.07, atol=0.02)
    assert quantized.read().data_ptr() == back.data_ptr()  # cast once
    assert ledger.recovered_bytes == value.numel() * 4
    del quantized
    assert ledger.held_bytes == ledger.recovered_bytes == 0


def test_integers_seen_in_a_float_storage_stay_exact():
    """Bits of floats read as integers are no numbers to round: here they are indices."""
    table = torch.randn(8, 4, requires_grad=True)
    factor = torch.ones(8, requires_grad=True)
    indices = torch.tensor([3, 1, 7, 0, 2, 5, 5, 6], dtype=torch.int32)
    scope = Scope(ByFunction(lambda site: Strategy.QUANTIZE), Ledger(), parameters=(), min_mitigated_bytes=1)
    with scope.open():
        values = scope.run(Site("a", "linear", 0), lambda i: i.view(torch.float32) + 0.0, indices)
        loss = (values * factor).sum()  # saves the floats, in 8 bits
        rows = table.index_select(0, values.view(torch.int32))  # saves the same storage, as indices
        loss = loss + (rows * rows).sum() / 2
        del values, rows
    assert scope.ledger.freed_bytes["quantize"] != 0
    loss.backward()
    wanted = torch.zeros(8, 4).index_add(0, indices, table.detach()[indices.long()])
    assert table.grad is not None and torch.equal(table.grad, wanted)


def test_a_value_that_is_held_anyway_is_not_quantized():
    """Held as it is by an operator that may be recomputed: a second form would only cost memory."""
    x = torch.randn(64, 64, requires_grad=True)
    choices = {"a": Strategy.QUANTIZE, "b": Strategy.RECOMPUTE, "c": Strategy.KEEP}
    scope = Scope(ByFunction(lambda site: choices[site.name]), Ledger(), parameters=(), min_mitigated_bytes=1)
    with scope.open():
        kept = x * 1  # made outside of operators: kept
        scope.run(Site("c", "linear", 0), torch.sin, kept)
        y = scope.run(Site("a", "linear", 0), lambda kept: kept * 2, kept)
        loss = (y * y).sum() + scope.run(Site("b", "linear", 0), torch.exp, y).sum()
        del y, kept
    held = scope.ledger.held_bytes
    assert held < 2 * 64 * 64 * 4  # y in 8 bits, once
    loss.backward()
    del loss
    assert scope.ledger.held_bytes == 0
