"""DeepSpeed's ZeRO-3 in launch settings, in training arguments or in the environment: found, to be refused.

ZeRO-3 gives every rank a part of each weight and gathers them in hooks of its own, which recomputing an operator would
not run. FSDP2, which transformers and accelerate both have, does the same in a way that can be managed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WAY_OUT = (
    "use FSDP2 and expert parallelism: parallel: {fsdp: N, ep: N} with distributed_type: MULTI_GPU, as in the recipe "
    "qwen3_30b_a3b_8gpu; for models without experts accelerate: gpu_8proc_fsdp2"
)
_ENVIRONMENT = "ACCELERATE_USE_DEEPSPEED"


def deepspeed_problem(settings: Mapping[str, Any], training: Mapping[str, Any], is_sharded: bool) -> str | None:
    """What is wrong with the DeepSpeed settings of a launch, as `key: what is wrong and what to do`; None: nothing.

    Args:
        settings: accelerate's.
        training: the recipe's training section.
        is_sharded: whether the recipe's parallel section shards the model.
    """
    section = settings.get("deepspeed_config") or {}
    kind = settings.get("distributed_type")
    if training.get("deepspeed"):
        place, stage = "training.deepspeed", _stage_of_config(training["deepspeed"])
    elif kind == "DEEPSPEED":
        place, stage = "distributed_type", _stage_of_section(section)
    else:
        return None
    if is_sharded:
        return f"{place}: DeepSpeed would shard a second time what the parallel section shards; {WAY_OUT}"
    return _zero_3(place) if stage == 3 else None


def launched_deepspeed_problem(training: Mapping[str, Any], is_sharded: bool) -> str | None:
    """The same for the process that runs, which knows the launcher's settings from its environment."""
    settings: dict[str, Any] = {}
    if os.environ.get(_ENVIRONMENT, "").lower() in ("1", "true"):
        stage = os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        section = {
            "zero_stage": int(stage) if stage.isdigit() else 2,
            **({"deepspeed_config_file": file} if file else {}),
        }
        settings = {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    return deepspeed_problem(settings, training, is_sharded)


def _zero_3(place: str) -> str:
    return (
        f"{place}: DeepSpeed ZeRO stage 3 spreads weights over the ranks and gathers them in hooks of its own, which "
        f"FlexTrainer cannot manage; {WAY_OUT}"
    )


def _stage_of_section(section: Any) -> int:
    if not isinstance(section, Mapping):
        return 0
    file = section.get("deepspeed_config_file")
    stage = section.get("zero_stage", 2)  # accelerate's default
    return _stage_of_config(file) if file and file != "none" else int(stage) if str(stage).isdigit() else 0


def _stage_of_config(config: Any) -> int:
    """The stage in DeepSpeed's own configuration, given as a mapping or as a JSON file; 0 where it has none."""
    if isinstance(config, (str, os.PathLike)):
        try:
            config = json.loads(Path(config).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0  # DeepSpeed itself says what is wrong with its file
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return int(stage) if str(stage).isdigit() else 0
