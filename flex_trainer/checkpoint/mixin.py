"""What a Trainer does differently when it saves and resumes.

    checkpoint-6/
      config.json, model.safetensors, ...     as ever: from_pretrained("checkpoint-6") works
      trainer_state.json, scheduler.pt, ...   as ever
      rng_state_0.pth, rng_state_1.pth        random streams, a file for each rank
      sharded/                                models that are sharded at load time: parameters and optimizer state
      flex_manifest.json                      size and checksum of each file, written last

Transformers' Trainer refuses to save what it takes to resume a model that is sharded at load time (DistributedConfig);
here that goes to `sharded/`. All checkpoints, of other models too, are written beside their place and moved there when
they are complete.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import PreTrainedModel, Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints

from flex_trainer.checkpoint.groups import SavedGroups
from flex_trainer.checkpoint.loaded import check_loaded_weights
from flex_trainer.checkpoint.sharded import (
    gather_whole,
    load_model,
    load_optimizer,
    optimizer_tensors,
    parameter_names,
    save_sharded,
)
from flex_trainer.checkpoint.staging import CheckpointError, Staging, check_checkpoint, find_checkpoint, recover
from flex_trainer.checkpoint.verify import SHARDED, Findings, verify
from flex_trainer.checkpoint.weights import load_weights, must_be_converted
from flex_trainer.errors import UserError

if TYPE_CHECKING:
    _TrainerBase = Trainer  # what the mixin is mixed into
else:
    _TrainerBase = object


class CheckpointMixin(_TrainerBase):
    """Saves whole checkpoints or none, and resumes models that are sharded at load time."""

    _staging: Staging | None = None
    """The checkpoint that is being written."""
    _asked_for_model_only: bool | None = None
    _has_damaged_hints = False
    checks_loaded_weights = True
    """Whether a model that was sharded while it was loaded is compared with its files, once, before it is trained."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        finally:
            if self._asked_for_model_only is not None:
                self.args.save_only_model = self._asked_for_model_only
                self._asked_for_model_only = None

    def _validate_args(self) -> None:
        super()._validate_args()
        if self.is_distributed_loading_by_transformers:
            # What comes next in Trainer's constructor refuses to go on, since it could not resume; we can.
            self._asked_for_model_only = self.args.save_only_model
            self.args.save_only_model = True

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        optimizer = super().create_optimizer(*args, **kwargs)
        is_saved = self.args.save_strategy != SaveStrategy.NO and not self.args.save_only_model
        if self.is_distributed_loading_by_transformers and is_saved:
            self._check_after_first_step(self._inner_optimizer())
        return optimizer

    def _check_after_first_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer whose state cannot be saved is refused as soon as it has one, not at the first checkpoint."""
        is_checked = False

        def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            nonlocal is_checked  # the hook stays: torch goes through its hooks when this one runs
            if not is_checked:
                is_checked = True
                optimizer_tensors(self._whole_model(), optimizer)

        optimizer.register_step_post_hook(check)

    def _save_own_state(self, directory: Path) -> None:
        """For subclasses: write what else this rank must remember into the checkpoint, without waiting for others."""

    def _load_own_state(self, directory: Path) -> None:
        """For subclasses: read what `_save_own_state` has written; not called where that is damaged."""

    # Saving

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        run_directory = Path(self._get_output_dir(trial))
        staging = Staging(run_directory, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        staging.begin(is_shared=self.is_distributed_loading_by_transformers)
        self._staging = staging
        try:
            with staging.together("the checkpoint"):
                super()._save_checkpoint(model, trial)
                self._save_own_state(staging.staged)
                self._name_best_checkpoint(staging)
            staging.publish()
        except BaseException:
            staging.discard()
            raise
        finally:
            self._staging = None
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(staging.final))
        if self.args.should_save:
            best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
            rotate_checkpoints(str(run_directory), limit, best_model_checkpoint=best, use_mtime=True)

    def _name_best_checkpoint(self, staging: Staging) -> None:
        """If this is the best checkpoint so far, Trainer has noted where it is written, not where it will be."""
        if self.state.best_model_checkpoint == str(staging.staged):
            self.state.best_model_checkpoint = str(staging.final)
            if self.args.should_save:
                self.state.save_to_json(str(staging.staged / TRAINER_STATE_NAME))

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging.directory)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is None:  # files are uploaded in the background: from where they stay
            super()._push_from_checkpoint(checkpoint_folder)

    def _together(self, what: str) -> AbstractContextManager[None]:
        return nullcontext() if self._staging is None else self._staging.together(what)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self._staging is None or not self.is_distributed_loading_by_transformers:
            with self._together("the model"):
                super()._save(output_dir, state_dict)
            return
        # First what ranks do together, then what one does alone and may fail at.
        if state_dict is None:
            try:
                state_dict = gather_whole(self._whole_model(), is_needed=self.args.should_save)
            except (RuntimeError, MemoryError) as error:  # the others wait inside: nothing can be agreed on
                raise CheckpointError(
                    f"{self._staging.name} was not saved: gathering its weights failed ({error})"
                ) from error
        with self._together("the model"):
            if self.args.should_save:
                with _written_alone(self.model):
                    super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_distributed_loading_by_transformers:
            with self._together("optimizer and scheduler"):
                super()._save_optimizer_and_scheduler(output_dir)
            return
        directory, model, optimizer = Path(output_dir) / SHARDED, self._whole_model(), self._inner_optimizer()
        with self._together("parameters and optimizer state"):
            save_sharded(directory, model, optimizer)
        with self._together("optimizer and scheduler"):
            if self.args.should_save:
                SavedGroups.of(optimizer, parameter_names(model)).save(directory)
                torch.save(self._scheduler().state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _save_scaler(self, output_dir: str) -> None:
        with self._together("the gradient scaler"):
            super()._save_scaler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        with self._together("random streams"):
            super()._save_rng_state(output_dir)

    # Resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        asked: Any = resume_from_checkpoint
        is_shared = self.is_distributed_loading_by_transformers
        if asked is True and self.args.output_dir is not None:
            recover(Path(self.args.output_dir))
            found, findings = find_checkpoint(Path(self.args.output_dir), is_shared)
            asked = str(found)
            self._note_hints(findings)
        elif isinstance(asked, str | os.PathLike):
            self._note_hints(check_checkpoint(Path(asked), is_shared))
            asked = str(asked)
        if self.checks_loaded_weights and is_shared and not asked:
            check_loaded_weights(self._whole_model())
        self.checks_loaded_weights = False  # from now on they are trained
        return super().train(asked, *args, **kwargs)

    def _note_hints(self, findings: Findings) -> None:
        self._has_damaged_hints = bool(findings.damaged_hints)
        if self._has_damaged_hints and self.args.process_index == 0:
            warnings.warn(
                f"The checkpoint is resumed without what the planner had learnt: {', '.join(findings.damaged_hints)}",
                stacklevel=3,
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if not self._load_weights(Path(resume_from_checkpoint), self._whole_model() if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint or "")
        damage = verify(best, self.is_distributed_loading_by_transformers).damage if best.is_dir() else ()
        if damage:
            raise UserError(f"the best model cannot be loaded: {str(best)!r} is damaged ({', '.join(damage[:3])})")
        if not self._load_weights(Path(self.state.best_model_checkpoint or ""), self._whole_model()):
            super()._load_best_model()

    def _load_weights(self, directory: Path, model: torch.nn.Module) -> bool:
        """Whether the weights were of a kind that Trainer cannot load, and are loaded."""
        if (directory / SHARDED).is_dir():
            load_model(directory / SHARDED, model)
            return True
        is_wrapped = self.is_fsdp_enabled or self.is_deepspeed_enabled
        if not is_wrapped and isinstance(model, PreTrainedModel) and must_be_converted(directory, model):
            load_weights(directory, model)
            return True
        return False

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        directory = None if checkpoint is None else Path(checkpoint)
        if directory is None or not (directory / SHARDED).is_dir():
            if directory is not None and self.is_distributed_loading_by_transformers:
                _refuse_whole_optimizer(directory)
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            self._load_sharded_optimizer(directory)
        if directory is not None and not self._has_damaged_hints:
            self._load_own_state(directory)

    def _load_sharded_optimizer(self, directory: Path) -> None:
        model, optimizer = self._whole_model(), self._inner_optimizer()
        saved = SavedGroups.load(directory / SHARDED)
        load_optimizer(directory / SHARDED, model, optimizer, saved)
        names = parameter_names(model)
        groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        state = torch.load(directory / SCHEDULER_NAME, weights_only=True)
        self._scheduler().load_state_dict(saved.regroup(state, groups))

    def _whole_model(self) -> torch.nn.Module:
        assert self.model is not None
        return self.accelerator.unwrap_model(self.model)

    def _inner_optimizer(self) -> torch.optim.Optimizer:
        optimizer: Any = self.optimizer
        return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer

    def _scheduler(self) -> Any:
        assert self.lr_scheduler is not None
        return self.lr_scheduler


@contextmanager
def _written_alone(model: Any) -> Iterator[None]:
    """Let this rank save a model whose weights were gathered: `save_pretrained` waits for no other rank inside."""
    config = model.config
    distributed_config, config.distributed_config = config.distributed_config, None
    try:
        yield
    finally:
        config.distributed_config = distributed_config


def _refuse_whole_optimizer(directory: Path) -> None:
    if (directory / OPTIMIZER_NAME).is_file():
        raise UserError(
            f"{str(directory)!r} was saved by a run whose model was not sharded: its {OPTIMIZER_NAME} cannot be spread "
            "over ranks. Resume it unsharded, or load its weights with from_pretrained(distributed_config=...) and "
            "start a new run."
        )
