"""Training runs that save and resume, on ranks and in one process."""

from __future__ import annotations

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from flex_trainer import FlexConfig, FlexTrainer
from flex_trainer.activations.identity import local_part
from flex_trainer.checkpoint import CheckpointError, CheckpointMixin
from flex_trainer.checkpoint.loaded import check_loaded_weights
from flex_trainer.checkpoint.manifest import FileFacts
from flex_trainer.checkpoint.placement import is_one_block
from flex_trainer.checkpoint.sharded import load_model, save_sharded
from flex_trainer.checkpoint.staging import find_checkpoint
from flex_trainer.errors import UserError
from flex_trainer.launch.distribute import distribute
from flex_trainer.testing.forced import whole
from flex_trainer.testing.tiny import tiny_model
from tests import process_wide

process_wide.share()

JOBS = "tests.distributed.checkpoint_jobs:"
NUM_EXPERTS = 8
EP2 = {"fsdp_size": 2, "ep_size": 2}


class CheckpointTrainer(CheckpointMixin, Trainer):
    """A Trainer that saves as FlexTrainer does, with nothing else of it."""


KEEP_THE_WORST = {
    "eval_strategy": "steps",
    "eval_steps": 3,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,  # the worst: not the last one, since the loss falls
    "save_total_limit": 2,
}
"""Settings of a run that ends with the checkpoint of step 3, and keeps both."""


@dataclass
class Run:
    """What one rank has when a run has ended. Tensors are whole, not this rank's part."""

    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    own_experts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Expert parameters as they lie on this rank."""


def assert_same_tensors(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Bit for bit, by name."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different, different


def assert_same_state(run: Run, other: Run) -> None:
    """Weights and what the optimizer keeps of them."""
    assert_same_tensors(run.parameters, other.parameters)
    assert_same_tensors(run.moments, other.moments)


def assert_same_run(run: Run, other: Run) -> None:
    """Every step, and the state at the end."""
    assert run.losses == other.losses, (run.losses, other.losses)
    assert run.grad_norms == other.grad_norms, (run.grad_norms, other.grad_norms)
    assert_same_state(run, other)


def save_tiny(directory: Path, architecture: str = "deepseek_v3", **overrides: Any) -> None:
    """A model to start from. Dropout draws from each rank's random stream in every step."""
    tiny_model(architecture, attention_dropout=0.1, **overrides).save_pretrained(directory)


def load(directory: Path, sizes: Mapping[str, Any] | None) -> PreTrainedModel:
    """`sizes`: of the meshes; None: a model in one process. With "is_whole" every rank loads all and keeps its part."""
    if not sizes:
        return AutoModelForCausalLM.from_pretrained(directory)
    settings: dict[str, Any] = {"ep_implementation": "all_to_all", **sizes}
    is_whole = settings.pop("is_whole", False)
    config = DistributedConfig(**settings)
    if is_whole:
        return distribute(AutoModelForCausalLM.from_pretrained(directory), config)
    return AutoModelForCausalLM.from_pretrained(directory, distributed_config=config)


def make_trainer(
    model: PreTrainedModel, output: Path, trainer_class: Any = CheckpointTrainer, flex: Any = None, **settings: Any
) -> Trainer:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # ranks live longer than a run
    defaults: dict[str, Any] = {
        "max_steps": 6,
        "save_steps": 3,
        "warmup_steps": 4,
        "learning_rate": 0.01,
        "max_grad_norm": 0.5,
        "weight_decay": 0.1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
    }
    fixed = {"output_dir": str(output), "use_cpu": True, "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(**fixed, **{**defaults, **settings})
    others: dict[str, Any] = {} if flex is None else {"flex": flex}
    return trainer_class(model=model, args=arguments, train_dataset=_dataset(64), eval_dataset=_dataset(4), **others)


def train(
    start: Path,
    output: Path,
    sizes: Mapping[str, Any] | None = None,
    resume: bool | str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Run:
    """Train a model from `start`; the series begin where the run began, or went on."""
    trainer = make_trainer(load(start, sizes), output, **(settings or {}))
    trainer.train(resume_from_checkpoint=resume)
    return summarize(trainer)


def restore(start: Path, checkpoint: Path, output: Path, sizes: Mapping[str, Any] | None = None) -> Run:
    """A trainer that has loaded a checkpoint and has not trained."""
    trainer = make_trainer(load(start, sizes), output)
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.create_optimizer_and_scheduler(6)
    trainer._load_optimizer_and_scheduler(str(checkpoint))
    return summarize(trainer)


def summarize(trainer: Trainer) -> Run:
    model: Any = trainer.model
    optimizer: Any = trainer.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    history = trainer.state.log_history
    run = Run(
        losses=[row["loss"] for row in history if "loss" in row],
        grad_norms=[row["grad_norm"] for row in history if "grad_norm" in row],
    )
    for name, parameter in model.named_parameters():
        run.parameters[name] = whole(parameter)
        if ".experts." in name:
            run.own_experts[name] = _own(parameter)
        for key, value in optimizer.state[parameter].items():
            run.moments[f"{name}/{key}"] = whole(value)
    return run


def _dataset(size: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 200, (size, 12), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def _own(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).clone()


def find(output: Path) -> tuple[str, str, int]:
    """Which checkpoint this rank would go on from or why from none, what it warned of, and how many files it read."""
    num_read = 0
    read_through = FileFacts.of

    def counted(path: Path) -> FileFacts:
        nonlocal num_read
        num_read += 1
        return read_through(path)

    FileFacts.of = counted  # type: ignore[method-assign,assignment]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = find_checkpoint(output, is_shared=True)[0].name
            except UserError as error:
                found = str(error)
    finally:
        FileFacts.of = read_through  # type: ignore[method-assign]
    return found, "; ".join(str(one.message) for one in caught), num_read


# Saving that fails


class FailingTrainer(CheckpointTrainer):
    """On one rank the system refuses to write more than a few kilobytes into any file, in one step's checkpoint."""

    failing_rank = 0
    failing_step = 6
    is_killed = False

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        is_here = self.args.process_index == self.failing_rank and self.state.global_step == self.failing_step
        if not is_here or self.is_killed:
            super()._save_checkpoint(model, trial)
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            super()._save_checkpoint(model, trial)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.is_killed and self.args.process_index == self.failing_rank:
            if self.state.global_step == self.failing_step:
                os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)


def fail_to_save(
    start: Path,
    output: Path,
    sizes: Mapping[str, Any] | None,
    failing_rank: int,
    is_killed: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> tuple[str, str, float]:
    """What each rank raised (kind and message), and how many seconds after the failing step had begun to be saved."""
    logging.disable_progress_bar()  # it writes too
    FailingTrainer.failing_rank, FailingTrainer.is_killed = failing_rank, is_killed
    trainer = make_trainer(load(start, sizes), output, FailingTrainer, **(settings or {}))
    clock = _SaveClock()
    trainer.add_callback(clock)
    try:
        trainer.train()
    except CheckpointError as error:
        return type(error).__name__, str(error), time.monotonic() - clock.began
    raise AssertionError("the checkpoint was saved")


class _SaveClock(TrainerCallback):
    began = 0.0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.began = time.monotonic()


# Constructing


def construct(start: Path, output: Path, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """What arguments look like to a user, and which mistakes are still told."""
    model = load(start, sizes)
    seen: dict[str, Any] = {}
    for name, settings in {
        "asked for all": {},
        "asked for the model": {"save_only_model": True},
        "asked for nothing": {"save_strategy": "no"},
    }.items():
        trainer = make_trainer(model, output, **settings)
        seen[name] = (trainer.args.save_only_model, str(trainer.args.save_strategy))
    for name, settings in {
        "no metric": {"save_strategy": "best"},
        "no data": {"eval_strategy": "steps", "eval_steps": 1, "has_eval": False},
    }.items():
        has_eval = settings.pop("has_eval", True)
        arguments = TrainingArguments(output_dir=str(output), use_cpu=True, report_to=[], **settings)
        datasets: Any = {"train_dataset": _dataset(4), "eval_dataset": _dataset(4) if has_eval else None}
        try:
            CheckpointTrainer(model=model, args=arguments, **datasets)
        except ValueError as error:
            seen[name] = (str(error), arguments.save_only_model)
    try:
        Trainer(model=model, args=TrainingArguments(output_dir=str(output), use_cpu=True, report_to=[]))
    except ValueError as error:
        seen["plain Trainer"] = str(error)
    return seen


# FlexTrainer


def train_flex(
    start: Path, output: Path, sizes: Mapping[str, Any], resume: bool | str | None = None, max_steps: int = 6
) -> tuple[Run, list[bool], list[str]]:
    """A managed run: also, for each micro-batch, whether it was the first of its kind; and which files there are."""
    flex = FlexConfig(memory_limit="8GiB", trace=False)
    trainer: Any = make_trainer(load(start, sizes), output, FlexTrainer, flex=flex, max_steps=max_steps)
    trainer.train(resume_from_checkpoint=resume)
    records = trainer.flex.records
    files = [path.name for path in (output / f"checkpoint-{max_steps}").iterdir()]
    return summarize(trainer), [record.is_profile for record in records], sorted(files)


def train_adapters(
    start: Path, output: Path, sizes: Mapping[str, Any], resume: bool | str | None = None, max_steps: int = 6
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and adapters of a LoRA run."""
    torch.manual_seed(0)
    lora: Any = LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model: Any = get_peft_model(load(start, sizes), lora)
    trainer = make_trainer(model, output, max_steps=max_steps)
    trainer.train(resume_from_checkpoint=resume)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}


def resume_weights(start: Path, checkpoint: Path, output: Path, sizes: Mapping[str, Any]) -> Run | str:
    """What a sharded trainer makes of a checkpoint that has no sharded state: its weights, or a refusal."""
    trainer = make_trainer(load(start, sizes), output)
    trainer._load_from_checkpoint(str(checkpoint))
    trainer.create_optimizer_and_scheduler(6)
    try:
        trainer._load_optimizer_and_scheduler(str(checkpoint))
    except UserError as error:
        return str(error)
    return summarize(trainer)


def load_into_another_model(start: Path, checkpoint: Path, output: Path, sizes: Mapping[str, Any]) -> str:
    try:
        restore(start, checkpoint, output, sizes)
    except UserError as error:
        return str(error)
    raise AssertionError("loaded")


class OddSGD(torch.optim.SGD):
    """Keeps something of its own for each parameter."""

    kept: Callable[[torch.Tensor], Any]

    def step(self, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = self.kept(parameter)
        return super().step(*args, **kwargs)


class AddsHook(TrainerCallback):
    """A user's own hook on the optimizer, after those of the Trainer."""

    def __init__(self) -> None:
        self.num_steps = 0

    def on_train_begin(self, *args: Any, optimizer: Any = None, **kwargs: Any) -> None:
        optimizer.optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_steps += 1


def train_with_an_odd_optimizer(
    start: Path, output: Path, sizes: Mapping[str, Any], kind: str, settings: Mapping[str, Any]
) -> tuple[str, int]:
    """The error, if there is one, and after how many finished steps."""
    trainer = make_trainer(load(start, sizes), output, **settings)
    model: Any = trainer.model
    trainer.optimizer = optimizer = OddSGD(model.parameters(), lr=0.01)
    optimizer.kept = {
        "factored": lambda parameter: torch.zeros(parameter.shape[:1]),
        "counting": lambda parameter: 1,
        "plain": lambda parameter: torch.zeros(1),
        "foreign": lambda parameter: torch.zeros(1),
    }[kind]
    if kind == "foreign":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    hook = AddsHook()
    trainer.add_callback(hook)
    try:
        trainer.train()
    except UserError as error:
        return str(error), trainer.state.global_step
    assert hook.num_steps == trainer.state.global_step
    return "", trainer.state.global_step


# Shards in several blocks


def save_and_load_strided(directory: Path) -> dict[str, Any]:
    """Eight rows on two ranks, of which rank 0 has 0 1 4 5, as in packed weights under tensor parallelism: saved, and
    loaded into zeros that lie the same way."""
    mesh = init_device_mesh("cpu", (2,))
    rows = torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]][torch.distributed.get_rank()], dtype=torch.float32)
    shape, stride, placements = torch.Size([8]), (1,), [_StridedShard(0, split_factor=2)]
    tensor = DTensor.from_local(rows, mesh, placements, shape=shape, stride=stride)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(tensor)
    save_sharded(directory, module, torch.optim.SGD(module.parameters(), lr=1.0))
    other = torch.nn.Module()
    zeros = DTensor.from_local(torch.zeros(4), mesh, placements, shape=shape, stride=stride)
    other.weight = torch.nn.Parameter(zeros)
    load_model(directory, other)
    alone = torch.zeros(8)
    load_state_dict({"model/weight": alone}, checkpoint_id=directory)
    loaded: Any = other.weight
    return {"is_one_block": is_one_block(tensor), "own": _own(loaded).tolist(), "whole": alone.tolist()}


# Weights as they were loaded


def check_loaded(start: Path, sizes: Mapping[str, Any], change: str = "") -> str:
    """What is said of a model that was sharded while it was loaded; empty: nothing. `change`: a tensor that this rank
    changes first, if it is rank 1."""
    config: Any = AutoConfig.from_pretrained(start)
    of_class: Any = getattr(transformers, config.architectures[0])
    model = of_class.from_pretrained(start, distributed_config=DistributedConfig(**sizes))
    if change and torch.distributed.get_rank() == 1:
        with torch.no_grad():
            local_part(dict(model.named_parameters())[change]).view(-1)[-1:].add_(1.0)
    return _told(model)


def draw_and_distribute(sizes: Mapping[str, Any], seeds: list[int]) -> str:
    """What is said of random weights that each rank draws whole from its own seed; empty: nothing."""
    model = tiny_model("qwen3_moe", seed=seeds[torch.distributed.get_rank()])
    try:
        distribute(model, DistributedConfig(**sizes))
    except UserError as error:
        return str(error)
    return ""


def train_wrongly_loaded(start: Path, output: Path, sizes: Mapping[str, Any], is_checked: bool) -> tuple[str, int]:
    """The error of a trainer, if there is one, and after how many steps."""
    trainer: Any = make_trainer(load(start, sizes), output, max_steps=1, save_strategy="no")
    if not is_checked:
        trainer.checks_loaded_weights = False
    try:
        trainer.train()
    except UserError as error:
        return str(error), trainer.state.global_step
    return "", trainer.state.global_step


def load_another(start: Path, sizes: Mapping[str, Any]) -> dict[str, str]:
    """What is said where there is nothing to compare with, and of files that are damaged meanwhile."""
    said = {}
    model: Any = load(start, {**sizes, "is_whole": True})
    said["spread after it was loaded"] = _told(model)
    with torch.no_grad():
        local_part(model.lm_head.weight).add_(1.0)
    said["changed"] = _told(model)
    model.name_or_path = str(start / "nothing")
    said["without files"] = _told(model)
    drawn: Any = distribute(tiny_model("qwen3_moe"), DistributedConfig(**sizes))
    drawn.name_or_path = str(start)
    said["drawn"] = _told(drawn)
    return said


def _told(model: Any) -> str:
    try:
        check_loaded_weights(model)
    except UserError as error:
        return str(error)
    return ""
