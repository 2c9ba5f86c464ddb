"""Tiny models in one process and the same spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

import flex_trainer  # noqa: F401  (registers "flex")
from flex_trainer.models.discovery import find_experts
from flex_trainer.testing.forced import whole
from flex_trainer.testing.tiny import tiny_model
from tests import process_wide

process_wide.share()

SEQUENCES = 8
LENGTH = 96


def saved_model(directory: Path, architecture: str, **overrides: Any) -> Path:
    """A tiny model of an architecture as a checkpoint."""
    path = directory / architecture
    if not path.exists():
        tiny_model(architecture, **overrides).save_pretrained(path)
    return path


def _class_of(path: Path) -> Any:
    """Also of those that no auto class for causal language models has."""
    config: Any = AutoConfig.from_pretrained(path)
    return getattr(transformers, config.architectures[0])


def whole_model(path: Path, **options: Any) -> PreTrainedModel:
    """The model in this process."""
    return _class_of(path).from_pretrained(path, **options).train()


def spread_model(path: Path, *, fsdp: int, ep: int, implementation: str = "flex", replicate: int = 1, **options: Any):
    """The model over all ranks of the job."""
    config = DistributedConfig(
        fsdp_size=fsdp, ep_size=ep, dp_replicate_size=replicate, ep_implementation=implementation
    )
    return _class_of(path).from_pretrained(path, distributed_config=config, **options).train()


def all_ids(model: Any, seed: int = 1) -> torch.Tensor:
    """The tokens of one step of all ranks, (SEQUENCES, LENGTH)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.get_text_config().vocab_size - 8, (SEQUENCES, LENGTH), generator=generator)


def my_part(ids: torch.Tensor) -> torch.Tensor:
    """This rank's sequences."""
    return ids.chunk(dist.get_world_size())[dist.get_rank()]


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every gradient, whole; all ranks call this."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def skew(model: nn.Module, num_layers: int | None = None) -> Callable[[], None]:
    """Send every token to the first experts, with the weights that the router chose, in the first layers (None: all).
    Returns what undoes it."""
    modules = list(find_experts(model))[:num_layers]
    hooks = [module.register_forward_pre_hook(_first_experts) for module in modules]

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def _first_experts(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden_states, index, weights = args
    return hidden_states, torch.arange(index.size(1)).expand_as(index), weights
