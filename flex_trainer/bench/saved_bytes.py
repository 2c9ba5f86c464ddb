"""Saved bytes as predicted on shapes alone, against what autograd really holds."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flex_trainer.activations.file_tier import FileTier
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.offload import OffloadStore
from flex_trainer.activations.scope import Scope
from flex_trainer.cost.graph import ActivationGraph
from flex_trainer.cost.profile import Profile
from flex_trainer.cost.roofline import Rates
from flex_trainer.cost.shape import BatchShape
from flex_trainer.cost.timeline import Timeline
from flex_trainer.models.discovery import ModelMap, Operator, discover, find_experts
from flex_trainer.models.instrument import Instrumentation
from flex_trainer.strategy import Site, Strategy
from flex_trainer.symbolic.forward import SymbolicModel
from flex_trainer.testing.cost_rules import evaluate
from flex_trainer.testing.tiny import tiny_batch, tiny_model

FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "hunyuan_v1_moe",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "llama",
)
ROUTED_FAMILIES = ("deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "qwen3_moe", "granitemoe")
TRACED_SHAPES = ((2, 24), (3, 40))
"""Shapes that are traced; the others are predicted from them."""
SHAPES = ((2, 24), (2, 72), (5, 48), (3, 192))
TRACED_ROWS = (24, 40)
GROUP_ROWS = 256
"""All rows of an expert-parallel group."""
ROWS = (0, 1, 3, 16, 63, 128, 255, GROUP_ROWS)
DTYPES = (torch.float32, torch.bfloat16)
_CPU = torch.device("cpu")
_RATES = Rates(smallest_moved_bytes=1)
"""Every value, however small, is moved or cast: these models are tiny."""

Choose = Callable[[Site], Strategy]


def _mixed(site: Site) -> Strategy:
    """One of the four at random, always the same for a site."""
    strategy = list(Strategy)[zlib.crc32(site.name.encode()) % 4]
    return strategy if site.allows(strategy) else Strategy.KEEP


def _everywhere(strategy: Strategy) -> Choose:
    return lambda site: strategy if site.allows(strategy) else Strategy.KEEP


CHOICES: dict[str, Choose] = {
    "keep": _everywhere(Strategy.KEEP),
    "recompute": _everywhere(Strategy.RECOMPUTE),
    "recompute_operators": lambda site: (
        Strategy.RECOMPUTE if site.allows(Strategy.RECOMPUTE) and not site.is_block else Strategy.KEEP
    ),
    "offload": _everywhere(Strategy.OFFLOAD),
    "quantize": _everywhere(Strategy.QUANTIZE),
    "mixed": _mixed,
}


@dataclass(frozen=True)
class Comparison:
    """One micro-batch under one choice of strategies."""

    case: str
    choice: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error_percent(self) -> float:
        """Of the measured bytes; where nothing at all is held, 0 if nothing was predicted, else 100."""
        if self.measured_bytes == 0:
            return 0.0 if self.predicted_bytes == 0 else 100.0
        return 100.0 * abs(self.predicted_bytes - self.measured_bytes) / self.measured_bytes


def compare_families(families: tuple[str, ...]) -> Iterator[Comparison]:
    """Whole models: two shapes are traced without data, and four run."""
    for family in families:
        for dtype in DTYPES:
            model = tiny_model(family)
            nn.Module.to(model, dtype)

            def batch(batch_size: int, sequence_length: int, model: Any = model) -> Mapping[str, Any]:
                return tiny_batch(model, batch_size=batch_size, sequence_length=sequence_length)

            profile = Profile()
            symbolic = SymbolicModel(model, _CPU, has_fused_attention=False)
            for shape in TRACED_SHAPES:
                forward = symbolic.trace((), batch(*shape))
                profile.observe(BatchShape(*shape), forward.trace, forward.routed_pairs)
            for shape in SHAPES:
                graph = profile.graph(BatchShape(*shape))
                for name, choose in CHOICES.items():
                    measured_bytes = _held_bytes(model, discover(model), batch(*shape), choose)
                    case = f"{family} {str(dtype).removeprefix('torch.')} {shape[0]}x{shape[1]}"
                    yield Comparison(case, name, predicted_held_bytes(graph, choose), measured_bytes)


def compare_routed(families: tuple[str, ...]) -> Iterator[Comparison]:
    """Expert blocks on chosen numbers of rows, as a rank under expert parallelism runs them: from none to all."""
    for family in families:
        for dtype in DTYPES:
            experts = next(find_experts(tiny_model(family))).to(dtype)
            rank = _Rank(experts)
            profile = Profile()
            symbolic = SymbolicModel(rank, _CPU, has_fused_attention=False, find=_find_block)
            for num_rows in TRACED_ROWS:
                forward = symbolic.trace((), _rows(experts, num_rows, dtype))
                profile.observe(BatchShape(1, num_rows), forward.trace, forward.routed_pairs)
            for num_rows in ROWS:
                graph = profile.graph(BatchShape(1, num_rows))
                for name, choose in CHOICES.items():
                    measured_bytes = _held_bytes(rank, _find_block(rank), _rows(experts, num_rows, dtype), choose)
                    case = f"{family} {str(dtype).removeprefix('torch.')} {num_rows} rows"
                    yield Comparison(case, name, predicted_held_bytes(graph, choose), measured_bytes)


def predicted_held_bytes(graph: ActivationGraph, choose: Choose) -> int:
    """Bytes held at the end of forward, from the cost model."""
    costs = [
        evaluate(segment, {index: choose(op.site) for index, op in enumerate(segment.operators)}, _RATES)
        for segment in graph.segments
    ]
    return Timeline(costs, graph.segments, None, graph.shared_bytes).peak().held_bytes


class _Rank(nn.Module):
    """One rank's experts, and nothing else."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
        return {"loss": self.experts(hidden_states, index, weights).float().sum()}


def _find_block(rank: nn.Module) -> ModelMap:
    block = Operator(rank.get_submodule("experts"), Site("experts", "experts", 0, is_block=True))
    return ModelMap(operators=(block,), layers=(), experts=(block,))


def _rows(experts: Any, num_rows: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Rows that were sent to this rank, each for one of its experts."""
    weight = next(parameter for name, parameter in experts.named_parameters() if name.startswith("down_proj"))
    hidden_size = weight.shape[-1] if getattr(experts, "is_transposed", False) else weight.shape[1]
    generator = torch.Generator().manual_seed(num_rows)
    return {
        "hidden_states": torch.randn(num_rows, hidden_size, generator=generator).to(dtype).requires_grad_(),
        "index": torch.randint(0, experts.num_experts, (num_rows, 1), generator=generator),
        "weights": torch.rand(num_rows, 1, generator=generator).to(dtype).requires_grad_(),
    }


class _Chosen:
    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def strategy(self, site: Site) -> Strategy:
        return self._choose(site)


def _held_bytes(model: nn.Module, model_map: ModelMap, batch: Mapping[str, Any], choose: Choose) -> int:
    """Bytes that autograd holds of a real micro-batch at the end of forward."""
    ledger, store = Ledger(), OffloadStore(FileTier())
    scope = Scope(
        _Chosen(choose),
        ledger,
        parameters=[*model.parameters(), *model.buffers()],
        store=lambda: store,
        min_mitigated_bytes=1,
    )
    instrumentation = Instrumentation(model, model_map)
    try:
        with scope.open():
            output = model(**batch)
        store.settle()
        held_bytes = ledger.held_bytes
    finally:
        instrumentation.remove()
    del output
    return held_bytes
