"""Which tests are quick and which are sweeps.

`make test` runs what is not marked `sweep`: every claim, on architectures that differ in structure. `make test-sweeps`
runs the rest: the same claims on all architectures, real runs of the benchmarks and long combinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

STRUCTURES = ("deepseek_v3", "gpt_oss", "qwen3_5_moe_text", "qwen3")
"""Latent attention with shared experts; fused experts with biases; hybrid attention; dense."""


def sweep_over(architectures: Sequence[str], quick: Sequence[str] = STRUCTURES) -> list[Any]:
    """Parameters for a test of each architecture: all but the `quick` ones are sweeps."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.sweep) for name in architectures]
