"""What is remembered of a run: its micro-batches, and the steps that were taken back. Reports, callbacks and other
tools read these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class MicroBatchRecord:
    """One micro-batch from budget to backward. All sizes in bytes, all times in milliseconds."""

    step: int
    """Optimizer step this micro-batch belongs to, from 0."""
    micro_batch: int
    """Running number of the micro-batch over the whole run, from 0."""
    num_tokens: int
    """Tokens in the micro-batch (batch x sequence, padding included)."""
    imbalance: float
    """Most tokens that one expert of this rank gets / mean of all experts (of all ranks, with expert parallelism); the
    largest over layers. 1.0 for dense models."""
    budget_bytes: int
    """Activation bytes the plan was allowed to hold (Algorithm 1)."""
    predicted_bytes: int
    """Activation bytes the plan was predicted to hold at the end of forward. Where experts are on several ranks: with
    the rows that arrived, known from their counts."""
    actual_bytes: int
    """Activation bytes really held at the end of forward."""
    freed_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes not held because of each strategy: keys recompute, offload, quantize."""
    plan_ms: float = 0.0
    """Time spent planning (budget, plan, re-plans)."""
    trace_ms: float = 0.0
    """Time spent tracing the micro-batch on shapes alone, where its sizes were not known (outside of `step_ms`)."""
    is_spike: bool = False
    """Whether keeping everything would have exceeded the budget."""
    demand_bytes: int = 0
    """Activation bytes that keeping everything would have held."""
    limit_bytes: int = 0
    """The memory limit in force."""
    baseline_bytes: int = 0
    """Memory in use before forward (weights, gradients, optimizer, everything else)."""
    predicted_peak_bytes: int = 0
    """Predicted peak of memory in use over forward and backward; with the same rows."""
    peak_bytes: int = 0
    """Measured peak of memory in use over forward and backward (process on CPU, allocated on CUDA)."""
    step_ms: float = 0.0
    """Forward plus backward time of this micro-batch, on the host."""
    run_ms: float = 0.0
    """The same without planning and without what lies between both passes: what `predicted_step_ms` is about."""
    predicted_step_ms: float = 0.0
    """Predicted time of forward and backward under the plan, without planning. 0 where nothing was predicted: before
    the first micro-batch has run, and for one that only measures. On CUDA it is time of the device."""
    num_replans: int = 0
    """How often the plan was changed after a router."""
    is_profile: bool = False
    """Whether this micro-batch was run with everything mitigated, to measure what could not be traced beforehand."""
    num_unmanaged: int = 0
    """Saved tensors of kinds the engine leaves alone (subclasses, sparse tensors): kept, and not counted in bytes."""

    @property
    def is_over_limit(self) -> bool:
        return self.peak_bytes > self.limit_bytes


@dataclass(frozen=True)
class StepRetry:
    """An optimizer step that was taken back and run again under a tighter plan, because an allocation failed."""

    step: int
    """Optimizer step, from 0."""
    micro_batch: int
    """Running number of the micro-batch that failed."""
    attempt: int
    """1: with a wider safety margin; 2: under the least demanding plan; 0: no allocation has failed, memory is shared
    out among more micro-batches in flight than before."""
    phase: str
    """What was going on: planning, forward, backward, recovery, or begin (no room was left for another forward)."""
    operator: str
    """The operator that was running; in backward, the one whose saved values were used last."""
    requested_bytes: int
    """Bytes that the failed allocation asked for; 0 when it did not say."""
    margin_bytes: int
    """Bytes kept free from now on."""
