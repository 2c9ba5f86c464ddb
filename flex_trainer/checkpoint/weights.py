"""Ordinary checkpoints (safetensors as `save_pretrained` writes them) into a model that stands.

Trainer does this with `load_state_dict` and leaves out what it does not find. Files often hold experts one by one,
where the model keeps all of a layer in one parameter: a resumed run would go on with the experts it was built with.
`from_pretrained` knows how to convert them.
"""

from __future__ import annotations

import copy
import json
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from flex_trainer.activations.identity import local_part
from flex_trainer.errors import UserError
from flex_trainer.models.sharding import original_class


def must_be_converted(directory: Path, model: PreTrainedModel) -> bool:
    """Whether the files in `directory` have other names or shapes than the model's parameters on this rank."""
    names = _names(directory)
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return bool(names) and (is_sharded or not names <= model.state_dict().keys())


def load_weights(directory: Path, model: PreTrainedModel) -> None:
    """Read the weights into `model`, in place. Takes the memory of a second copy of this rank's weights meanwhile.

    All ranks must call this where the model is sharded.

    Raises:
        ValueError: the files lack some of the model's weights.
    """
    # Wide enough for every parameter and saved buffer: narrowing again is exact.
    dtypes = {tensor.dtype for tensor in model.state_dict().values() if tensor.dtype.is_floating_point}
    dtype = reduce(torch.promote_types, dtypes)
    arguments: dict[str, Any] = {"dtype": dtype, "config": copy.deepcopy(model.config)}
    if getattr(model, "is_distributed_loading_by_transformers", False):
        arguments["distributed_config"] = model.config.distributed_config
    of_class: Any = original_class(model)
    loaded, found = of_class.from_pretrained(directory, output_loading_info=True, **arguments)
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        raise UserError(
            f"{str(directory)!r} lacks {len(missing)} weights of this {type(model).__name__} ({missing[0]!r} for one); "
            "resume with the model that was trained"
        )
    weights = loaded.state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            local_part(tensor).copy_(local_part(weights[name]))


def _names(directory: Path) -> set[str]:
    """Names of the tensors in a directory's safetensors files; none if it has none."""
    index, single = directory / SAFE_WEIGHTS_INDEX_NAME, directory / SAFE_WEIGHTS_NAME
    if index.is_file():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if single.is_file():
        with safe_open(single, framework="pt") as file:
            return set(file.keys())
    return set()
