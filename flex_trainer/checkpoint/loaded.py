"""Whether a model that was sharded while it was loaded has the weights of its files.

Transformers reads each rank's part of each tensor in the files and converts what it has read. Where a conversion does
not commute with taking parts, ranks get other weights than one process would, without a word: three tensors that are
concatenated along the dimension that is sharded, for one (transformers 5.24). So the files are read once more, whole
tensors this time, each by one rank, converted as one process does, and compared by checksum.
"""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from flex_trainer.checkpoint.failures import gather_failures, in_words
from flex_trainer.checkpoint.manifest import shares
from flex_trainer.compat import convert_into, names_in_model, weight_conversions
from flex_trainer.errors import UserError
from flex_trainer.models.checksums import checksum, differing, names_of
from flex_trainer.models.sharding import original_class, reshard
from flex_trainer.ranks import num_ranks, this_rank

logger = logging.getLogger(__name__)
_BATCH_ELEMENTS = 1 << 27
"""In one call of transformers, unless a tensor has more."""


def check_loaded_weights(model: nn.Module) -> None:
    """Compare a model that was sharded at load time with the files it comes from. All ranks must call this, before
    anything has changed the weights.

    Each file is read once, by the ranks together; each rank needs host memory for the largest tensor, twice. Nothing is
    done for a model that was not loaded, is quantized, or whose safetensors files cannot be found.

    Raises:
        ValueError: tensors that differ, by name; files that cannot be read. On every rank alike.
    """
    base: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    if not isinstance(base, PreTrainedModel) or not hasattr(base, "_weight_conversions"):
        return
    if getattr(base, "hf_quantizer", None) is not None:
        return
    files = _files_of(base)
    if not files:
        logger.warning("The sharded weights of %s are not compared with its files: none are found", base.name_or_path)
        return
    reshard(model)
    tensors = {_plain_name(name): tensor for name, tensor in base.state_dict(keep_vars=True).items()}
    error: Exception | None = None
    expected: dict[str, int] = {}
    try:
        expected = _read_own_share(files, base, tensors)
    except Exception as raised:  # the others wait to hear of it
        error = raised
    failures = gather_failures(error)
    if failures:
        is_refused = all(failure.is_refused_by_system for failure in failures.values())
        raise (UserError if is_refused else RuntimeError)(
            f"the sharded weights cannot be compared with {base.name_or_path!r} ({in_words(failures)})"
        ) from error
    found = differing(tensors, expected)
    if found:
        raise UserError(
            f"{original_class(base).__name__} was sharded while it was loaded, and {len(found)} of its {len(tensors)} "
            f"tensors are not those of {base.name_or_path!r}: {names_of(found)}. Load it without distributed_config on "
            "every rank and spread it with flex_trainer.launch.distribute.distribute(model, config); or, if they were "
            "changed on purpose, set trainer.checks_loaded_weights = False."
        )


def _read_own_share(files: list[Path], model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Checksums of this rank's share of the tensors, by name in the model, as one process would have loaded them."""
    skeleton = _skeleton(model, tensors)
    conversions = weight_conversions(skeleton)
    found: dict[str, int] = {}
    with ExitStack() as opened, _without_progress_bars():
        sources: dict[str, dict[str, Any]] = {}
        sizes: dict[str, int] = {}
        for path in files:
            file = opened.enter_context(safe_open(path, framework="pt"))
            targets = names_in_model(list(file.keys()), skeleton, conversions)
            for name, target in targets.items():
                part = file.get_slice(name)
                sources.setdefault(target, {})[name] = part
                sizes[target] = sizes.get(target, 0) + math.prod(part.get_shape())
        own = shares(sizes, range(num_ranks())).get(this_rank(), [])
        while own:
            batch: dict[str, Any] = {}
            num_elements = 0
            while own and (not batch or num_elements + sizes[own[0]] <= _BATCH_ELEMENTS):
                num_elements += sizes[own[0]]
                batch |= sources[own.pop(0)]
            convert_into(skeleton, batch, conversions)
            found |= _take_checksums(skeleton)
    return found


def _skeleton(model: Any, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The same model on one process, without memory: whole shapes, and dtypes as they are in the model."""
    config = copy.deepcopy(model.config)
    config.distributed_config = None
    with torch.device("meta"):
        skeleton: PreTrainedModel = original_class(model)(config)
    for name, tensor in skeleton.state_dict().items():
        dtype = tensors[name].dtype if name in tensors else tensor.dtype
        _set(skeleton, name, torch.empty(tensor.shape, dtype=dtype, device="meta"))
    return skeleton


def _take_checksums(skeleton: PreTrainedModel) -> dict[str, int]:
    """Of all tensors that were read into it, which are given up."""
    found = {}
    for name, tensor in skeleton.state_dict().items():
        if tensor.device.type != "meta":
            found[name] = checksum(tensor)
            _set(skeleton, name, torch.empty_like(tensor, device="meta"))
    return found


def _set(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, own_name = name.rpartition(".")
    module = model.get_submodule(path)
    if own_name in module._buffers:
        module._buffers[own_name] = tensor
    else:
        module._parameters[own_name] = nn.Parameter(tensor, requires_grad=False)


def _files_of(model: PreTrainedModel) -> list[Path]:
    """The safetensors files that a model was loaded from; none: they are not known."""
    index = _file(model, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        single = _file(model, SAFE_WEIGHTS_NAME)
        return [] if single is None else [single]
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    files = [_file(model, name) for name in names]
    return [] if None in files else [file for file in files if file is not None]


def _file(model: PreTrainedModel, name: str) -> Path | None:
    source = model.name_or_path
    if not source:
        return None
    if Path(source).is_dir():
        return Path(source) / name if (Path(source) / name).is_file() else None
    revision = getattr(model.config, "_commit_hash", None)
    try:  # of the hub: where from_pretrained has put it
        found = cached_file(
            source,
            name,
            revision=revision,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def _plain_name(name: str) -> str:
    """Without what adapters around a model add to its names."""
    return name.replace(".base_layer.", ".")


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()
