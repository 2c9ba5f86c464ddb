"""What the sizes of a forward's activations depend on, read off its inputs."""

from __future__ import annotations

from typing import Any

import torch

from flex_trainer.cost.shape import BatchShape

_MAIN_INPUTS = ("input_ids", "inputs_embeds", "decoder_input_ids", "input_values", "input_features", "pixel_values")


def shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchShape:
    """The shape of a micro-batch: batch size, sequence length, and what else may change which operators run.

    A padding mask that masks nothing is skipped by transformers' mask functions, and then attention runs another way:
    so whether there is padding is part of the kind.
    """
    tensors = {f"arg{number}": arg for number, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    tensors.update({name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)})
    main = next((tensors[name] for name in _MAIN_INPUTS if name in tensors), None)
    if main is None:
        main = next((tensor for tensor in tensors.values() if tensor.dim() >= 2), None)
    batch_size, sequence_length = (main.shape[0], main.shape[1]) if main is not None and main.dim() >= 2 else (1, 1)
    facts = [f"{name}:{tensor.dim()}:{tensor.dtype}" for name, tensor in sorted(tensors.items())]
    mask = tensors.get("attention_mask")
    has_padding = mask is not None and mask.dim() == 2 and not bool(mask.all())
    positions = tensors.get("position_ids")
    if mask is None and positions is not None and positions.dim() == 2:
        # Packed sequences: positions start anew, and a mask is made that keeps them apart.
        has_padding = bool((positions.diff(dim=1) != 1).any())
    # Other inputs with sizes of their own (images, frames) make batches of their own kind; those that grow with the
    # batch (positions shared by all rows, masks of length x length) do not, so these sizes are named, not numbered.
    names = {sequence_length: "S", batch_size: "B"}
    for name, tensor in sorted(tensors.items()):
        if tensor.dim() >= 2 and tensor is not main and tensor.shape[:2] != (batch_size, sequence_length):
            facts.append(f"{name}=({','.join(names.get(size, str(size)) for size in tensor.shape)})")
    flags = {name: value for name, value in kwargs.items() if isinstance(value, (bool, str))}
    facts += [f"{name}={value}" for name, value in sorted(flags.items())]
    device = main.device.type if main is not None else "cpu"
    if torch.is_autocast_enabled(device):
        facts.append(f"autocast={torch.get_autocast_dtype(device)}")
    return BatchShape(batch_size, sequence_length, " ".join(facts), has_padding)
