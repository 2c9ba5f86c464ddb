"""FlexTrainer: Mixture-of-Experts training that stays inside its memory limit.

The names below are imported on first use, so that `import flex_trainer` (and the command line's `--help`) does not pay
for torch and transformers. What it does at once: `ep_implementation="flex"` is registered with transformers (as soon as
that is imported).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from flex_trainer.experts.registration import register

if TYPE_CHECKING:
    from flex_trainer.config import FlexConfig
    from flex_trainer.plugin import FlexPlugin
    from flex_trainer.provision.device_books import MemoryLimitError
    from flex_trainer.records import MicroBatchRecord
    from flex_trainer.runtime import FlexRuntime
    from flex_trainer.trainer import FlexTrainer, FlexTrainerMixin

__version__ = "0.1.0"

_HOMES = {
    "FlexConfig": "flex_trainer.config",
    "FlexPlugin": "flex_trainer.plugin",
    "FlexRuntime": "flex_trainer.runtime",
    "FlexTrainer": "flex_trainer.trainer",
    "FlexTrainerMixin": "flex_trainer.trainer",
    "MemoryLimitError": "flex_trainer.provision.device_books",
    "MicroBatchRecord": "flex_trainer.records",
}

__all__ = [
    "FlexConfig",
    "FlexPlugin",
    "FlexRuntime",
    "FlexTrainer",
    "FlexTrainerMixin",
    "MemoryLimitError",
    "MicroBatchRecord",
    "__version__",
]

register()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'flex_trainer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
