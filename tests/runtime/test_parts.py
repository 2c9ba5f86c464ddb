"""Two parts of a model on one device, as two stages of a pipeline: one limit, plans of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from flex_trainer.config import FlexConfig
from flex_trainer.errors import UserError
from flex_trainer.runtime import FlexRuntime
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter

ROOM_BYTES = 3_000_000


class Stage(nn.Module):
    """Some layers of a llama, with the embedding in front or norm, head and loss behind."""

    def __init__(self, model: Any, layers: slice, *, is_first: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(model.model.layers[layers])
        self.rotary = model.model.rotary_emb
        self.embed = model.model.embed_tokens if is_first else None
        self.norm, self.head = (None, None) if is_first else (model.model.norm, model.lm_head)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1])[None]
        cos_and_sin = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=cos_and_sin, position_ids=positions)
        if self.norm is None or self.head is None or labels is None:
            return x
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def stages() -> tuple[Stage, Stage]:
    model = tiny_model("llama", num_hidden_layers=4)
    return Stage(model, slice(0, 2), is_first=True), Stage(model, slice(2, 4), is_first=False)


def grads(*parts: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for part in parts for p in part.parameters() if p.grad is not None]


def inputs_of(first: Stage, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    model = tiny_model("llama", num_hidden_layers=4)
    batch = tiny_batch(model, 2, 64, seed=seed)
    return batch["input_ids"], batch["labels"]


@pytest.fixture
def run(deterministic: None) -> Iterator[Any]:
    runtimes: list[FlexRuntime] = []

    def make(room_bytes: int = ROOM_BYTES) -> tuple[FlexRuntime, Stage, Stage]:
        first, last = stages()
        runtime = FlexRuntime(FlexConfig(BASE_BYTES + room_bytes, ("recompute",), transient_reserve=0))
        with_fake_meter(runtime)
        runtimes.append(runtime)
        runtime.attach(first, part="first")
        runtime.attach(last, part="last")
        return runtime, first, last

    yield make
    for runtime in runtimes:
        runtime.detach()


def plain(seeds: list[int]) -> list[torch.Tensor]:
    first, last = stages()
    for seed in seeds:
        ids, labels = inputs_of(first, seed)
        last(first(ids), labels).backward()
    return grads(first, last)


class Pipeline:
    """Runs actions as a schedule would, with stage boundaries that are detached as between ranks."""

    def __init__(self, runtime: FlexRuntime, first: Stage, last: Stage) -> None:
        self.runtime, self.first, self.last = runtime, first, last
        self.sent: dict[int, torch.Tensor] = {}
        self.received: dict[int, torch.Tensor] = {}
        self.losses: dict[int, torch.Tensor] = {}

    def forward(self, part: str, number: int) -> None:
        ids, labels = inputs_of(self.first, number)
        with self.runtime.forward(part, number):
            if part == "first":
                self.sent[number] = self.first(ids)
            else:
                self.received[number] = self.sent[number].detach().requires_grad_()
                self.losses[number] = self.last(self.received[number], labels)

    def backward(self, part: str, number: int) -> None:
        with self.runtime.backward(part, number):
            if part == "last":
                self.losses.pop(number).backward()
            else:
                self.sent.pop(number).backward(self.received.pop(number).grad)


# F0(a) F0(b) of the first stage, then of the last, backwards the other way round; and one after the other.
INTERLEAVED = "F first 0, F first 1, F last 0, B last 0, F last 1, B last 1, B first 1, B first 0"
STRAIGHT = "F first 0, F last 0, B last 0, B first 0, F first 1, F last 1, B last 1, B first 1"


@pytest.mark.parametrize(
    ("actions", "most_in_flight"), [(INTERLEAVED, 3), (STRAIGHT, 2)], ids=["interleaved", "straight"]
)
def test_two_parts_in_one_process(run: Any, actions: str, most_in_flight: int) -> None:
    runtime, first, last = run()
    runtime.follow_schedule(most_in_flight)
    pipeline = Pipeline(runtime, first, last)
    for _ in range(2):  # the first time, what cannot be traced is found out
        first.zero_grad()
        last.zero_grad()
        before = runtime.records.num_total
        most = 0
        for action in actions.split(", "):
            kind, part, number = action.split()
            (pipeline.forward if kind == "F" else pipeline.backward)(part, int(number))
            most = max(most, len(runtime.in_flight))
        assert most == most_in_flight and runtime.in_flight == []
        assert runtime.books.budgets.in_flight_bytes == 0
        assert all(torch.equal(a, b) for a, b in zip(grads(first, last), plain([0, 1]), strict=True))
        new = runtime.records.since(before)
        in_order = [(part, int(number)) for kind, part, number in map(str.split, actions.split(", ")) if kind == "B"]
        assert [(record.part, record.micro_batch) for record in new] == in_order
        # One limit for both, and what the others hold is in what each finds in use.
        assert all(record.limit_bytes == BASE_BYTES + ROOM_BYTES for record in new)
        assert not any(record.is_over_limit for record in new)
    assert runtime.part("first").profile is not runtime.part("last").profile
    assert [record.is_profile for record in new] == [False] * 4


def test_less_is_left_for_the_other_part(run: Any) -> None:
    """What the first stage holds is taken off the budget of the last: kept whole alone, and not with others held."""
    held = {}
    for num_first in (1, 3):
        runtime, first, last = run()
        runtime.follow_schedule(num_first + 1)
        pipeline = Pipeline(runtime, first, last)
        for _ in range(2):
            for number in range(num_first):
                pipeline.forward("first", number)
            in_use_bytes = runtime.books.meter.in_use_bytes()
            pipeline.forward("last", 0)
            pipeline.backward("last", 0)
            pipeline.backward("first", 0)
            for number in range(1, num_first):
                pipeline.received[number] = pipeline.sent[number].detach()
                pipeline.received[number].grad = torch.zeros_like(pipeline.sent[number])
                pipeline.backward("first", number)
        (of_last,) = [record for record in runtime.records[-num_first - 1 :] if record.part == "last"]
        assert of_last.baseline_bytes == in_use_bytes
        held[num_first] = of_last
    assert held[3].baseline_bytes > held[1].baseline_bytes
    assert held[3].budget_bytes < held[1].budget_bytes
    assert not held[1].is_over_limit and not held[3].is_over_limit


def test_numbers_are_counted_in_each_part(run: Any) -> None:
    runtime, first, last = run()
    for seed in range(2):
        ids, labels = inputs_of(first, seed)
        loss = last(first(ids), labels)
        with runtime.backward():
            loss.backward()
    found = [(record.part, record.micro_batch) for record in runtime.records]
    assert found == [("first", 0), ("last", 0), ("first", 1), ("last", 1)]
    assert all(torch.equal(a, b) for a, b in zip(grads(first, last), plain([0, 1]), strict=True))


def test_parts_are_attached_and_given_back_together(run: Any, tmp_path: Any) -> None:
    runtime, first, last = run()
    assert runtime.models == [first, last] and runtime.model_name == "Stage"
    for name in ("first", ""):
        with pytest.raises(RuntimeError, match="manages a model already"):
            runtime.attach(stages()[0], part=name)
    with pytest.raises(UserError, match=r"on cpu, and this one is on meta"):
        runtime.attach(stages()[0].to("meta"), part="elsewhere")
    runtime.save_planner(tmp_path / "planner.json")
    assert {path.name for path in tmp_path.iterdir()} == {"planner-first.json", "planner-last.json"}
    runtime.detach()
    assert all("forward" not in vars(module) for stage in (first, last) for module in stage.modules())
    runtime.attach(first)  # now alone
    assert runtime.models == [first]
