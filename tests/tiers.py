"""Which tests are quick and which are sweeps.

`make test` runs what is not marked `sweep`: every claim, on architectures that differ in structure. `make test-sweeps`
runs the rest: the same claims on all architectures, real runs of the benchmarks and long combinations, and the tests of
properties (`examples`) once more, with more examples.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

STRUCTURES = ("deepseek_v3", "gpt_oss", "qwen3_5_moe_text", "qwen3")
"""Latent attention with shared experts; fused experts with biases; hybrid attention; dense."""


def sweep_over(architectures: Sequence[str], quick: Sequence[str] = STRUCTURES) -> list[Any]:
    """Parameters for a test of each architecture: all but the `quick` ones are sweeps."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.sweep) for name in architectures]


def first_quick(values: Sequence[Any], num_quick: int = 1) -> list[Any]:
    """Parameters for a test of several variants of one claim: all but the first ones are sweeps."""
    marked = [value if isinstance(value, tuple) else (value,) for value in values[num_quick:]]
    return [*values[:num_quick], *(pytest.param(*value, marks=pytest.mark.sweep) for value in marked)]


def examples(number: int) -> settings:
    """Settings of a test of a property: `number` examples in `make test-sweeps`, a quarter of them in `make test`."""
    has_all = os.environ.get("FLEX_TEST_EXAMPLES") == "all"
    return settings(max_examples=number if has_all else number // 4, deadline=None)
