"""The little of CUDA that the pinned tier needs, in one place: two copy streams, copies, pinned buffers."""

from __future__ import annotations

import torch

from flex_trainer.compat import release_pinned_cache


class CopyStreams:
    """One stream down (device to host) and one up, so that copies of both directions share the bus.

    `device` has an index. The thread's current device may be another one: nothing here depends on it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.down = torch.cuda.Stream(device)
        self.up = torch.cuda.Stream(device)

    def current(self) -> torch.cuda.Stream:
        """The stream on which this thread computes. In backward, autograd makes it the one of the node's forward."""
        return torch.cuda.current_stream(self._device)

    def copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        """Copy on `stream`, and return an event behind the copy. One side is pinned, so the host does not wait."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def keep_for(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """The tensor's memory, once freed, is used again only after what is on `stream` then. Costs nothing on the
        stream that the tensor was allocated on."""
        tensor.record_stream(stream)

    def pin(self, num_bytes: int) -> torch.Tensor:
        """A pinned uint8 buffer.

        Raises:
            RuntimeError: the driver cannot pin that much.
        """
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def unpin_cached(self) -> None:
        """Give back to the system what torch's pinned allocator holds unused. Waits for both streams."""
        self.down.synchronize()
        self.up.synchronize()
        release_pinned_cache()
