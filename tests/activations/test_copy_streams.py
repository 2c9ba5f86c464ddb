"""The calls to CUDA, in their order, on stand-ins: streams of the model's device, whichever is current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from flex_trainer.activations.copy_streams import CopyStreams

DEVICE = torch.device("cuda", 1)


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        assert device == DEVICE
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        stream.calls.append("event")


def test_copies_are_recorded_on_their_stream(monkeypatch: pytest.MonkeyPatch):
    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        stream.calls.append("enter")
        yield
        stream.calls.append("exit")

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("current", device))
    emptied: list[str] = []
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: emptied.append("host"), raising=False)
    streams = CopyStreams(DEVICE)
    assert streams.current() == ("current", DEVICE)
    target = torch.zeros(4, dtype=torch.uint8)
    assert isinstance(streams.copy(streams.down, target, torch.arange(4, dtype=torch.uint8)), FakeEvent)
    assert target.tolist() == [0, 1, 2, 3]
    down, up = streams.down, streams.up
    assert isinstance(down, FakeStream) and isinstance(up, FakeStream)
    assert down.calls == ["enter", "exit", "event"] and up.calls == []
    streams.unpin_cached()
    assert down.calls[-1] == up.calls[-1] == "synchronize" and emptied == ["host"]
