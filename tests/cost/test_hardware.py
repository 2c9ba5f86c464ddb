"""The table of devices, and what its rooflines say."""

from __future__ import annotations

import pytest

from flex_trainer.cost.hardware import HARDWARE, Attainable, Hardware, knee_bytes, of_device_name
from flex_trainer.errors import UserError

PLAIN = Hardware(
    "plain", "Plain", 10**9, {"bfloat16": 100e12}, 1e12, 40e9, 200e9, 20e9, 8, Attainable(0.5, 0.5, 0.5, 0.5), 1e-6
)


def test_the_table_has_what_was_promised():
    assert set(HARDWARE) == {"h100", "h200", "b200", "a100", "mi300x", "64gb-480tflops"}
    for hardware in HARDWARE.values():
        assert hardware.memory_bytes >= 64 * 10**9
        assert hardware.peak_flops["bfloat16"] > hardware.peak_flops["tf32"] > hardware.peak_flops["float32"]
        assert hardware.network_bytes_per_second < hardware.host_link_bytes_per_second
        assert hardware.host_link_bytes_per_second < hardware.node_link_bytes_per_second
        assert hardware.node_link_bytes_per_second < hardware.memory_bytes_per_second


def test_the_slower_of_arithmetic_and_memory_counts():
    assert PLAIN.operator_seconds(50e9, 1, "bfloat16") == pytest.approx(1e-3 + 1e-6)
    assert PLAIN.operator_seconds(1, 5e9, "bfloat16") == pytest.approx(1e-2 + 1e-6)
    assert PLAIN.operator_seconds(0, 0, "bfloat16") == 0


def test_an_offloaded_byte_crosses_the_link_twice():
    rates = PLAIN.rates(123)
    assert rates.offload.bytes_per_second == pytest.approx(10e9)
    assert rates.in_flight_bytes == 123
    # The paper's example: 96 MB down and up in 4 ms.
    paper = HARDWARE["64gb-480tflops"].rates().offload
    assert 96e6 / paper.bytes_per_second == pytest.approx(4e-3)


def test_the_knee_is_where_overhead_and_bandwidth_take_as_long():
    offload = PLAIN.rates().offload
    knee = knee_bytes(offload)
    assert offload.seconds(int(knee)) == pytest.approx(2 * offload.overhead_seconds)


def test_collectives():
    # Inside the node at 100 GB/s, across nodes at 10 GB/s; a rank receives 7 of 8 parts, 15 of 16.
    assert PLAIN.ring_seconds(8e9, 8, 8) == pytest.approx(7e9 / 100e9)
    assert PLAIN.ring_seconds(16e9, 16, 8) == pytest.approx(15e9 / 10e9)
    assert PLAIN.ring_seconds(1e9, 1, 8) == PLAIN.all_to_all_seconds(1e9, 1, 8) == 0
    assert PLAIN.all_to_all_seconds(16e9, 16, 8) == pytest.approx(8e9 / 10e9)
    assert PLAIN.all_to_all_seconds(8e9, 8, 8) == pytest.approx(7e9 / 100e9)


def test_names_of_devices():
    found = of_device_name("NVIDIA H100 80GB HBM3")
    assert found is not None and found.name == "h100"
    assert of_device_name("Some other device") is None


def test_a_type_without_a_figure_is_said():
    with pytest.raises(UserError, match="'a100' has no figure for float8"):
        HARDWARE["a100"].flops_per_second("float8")
