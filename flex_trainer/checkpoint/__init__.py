"""Checkpoints: of models that are sharded over ranks too, and complete or not there at all.

mixin.py has what the Trainer calls; staging.py makes a checkpoint appear whole or not at all; sharded.py writes and
reads models and optimizers that are spread over ranks; weights.py puts ordinary safetensors files into a model.
"""

from flex_trainer.checkpoint.mixin import CheckpointMixin
from flex_trainer.checkpoint.staging import CheckpointError, last_checkpoint

__all__ = ["CheckpointError", "CheckpointMixin", "last_checkpoint"]
