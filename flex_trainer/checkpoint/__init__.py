"""Checkpoints: of models that are sharded over ranks too, and complete or not there at all.

mixin.py has what the Trainer calls; staging.py makes a checkpoint appear whole or not at all; manifest.py and verify.py
tell whether it still is; sharded.py writes and reads models and optimizers that are spread over ranks; weights.py puts
ordinary safetensors files into a model; loaded.py compares a model that was sharded while it was loaded with its files.
"""

from flex_trainer.checkpoint.loaded import check_loaded_weights
from flex_trainer.checkpoint.mixin import CheckpointMixin
from flex_trainer.checkpoint.staging import CheckpointError, last_checkpoint

__all__ = ["CheckpointError", "CheckpointMixin", "check_loaded_weights", "last_checkpoint"]
