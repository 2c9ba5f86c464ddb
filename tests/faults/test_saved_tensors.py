"""Known faults of saved tensors: views rebuilt wrongly, values held for ever, weights copied, changes unnoticed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from flex_trainer.activations.demand import Demand
from flex_trainer.activations.file_tier import FileTier
from flex_trainer.activations.identity import storage_key
from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.offload import OffloadStore
from flex_trainer.activations.scope import Scope
from flex_trainer.config import FlexConfig
from flex_trainer.models.sharding import refuse_unmanaged
from flex_trainer.runtime import FlexRuntime
from flex_trainer.strategy import Strategy
from flex_trainer.testing.steps import ByFunction, instrumented
from flex_trainer.testing.tiny import FAMILIES, tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter
from tests.faults.live_bytes import live_bytes
from tests.faults.outcomes import STRATEGIES, Forward, outcome
from tests.faults.small_scopes import ALL, A, B, assert_equal_or_near, leaf, scope_of
from tests.runtime_steps import without_forecast

# 19: branches that backward does not reach


def unused_expert(model: Any) -> None:
    for layer in model.model.layers[1:]:
        gate = layer.mlp.gate
        gate.weight.data[5:] = -gate.weight.data[:1].abs() - 9.0  # rarely or never chosen


@pytest.mark.parametrize(
    ("name", "experts_implementation"),
    [("recompute blocks", "grouped_mm"), ("quantize", "grouped_mm"), ("mixed", "eager")],
)
def test_an_unused_expert_leaves_nothing_over_twenty_steps(name: str, experts_implementation: str) -> None:
    """19: experts without a token save values that no backward asks for. Nothing is held after any of 20 steps, and
    no tensor of a step is alive after it, without the cyclic collector."""
    model = tiny_model("qwen3_moe", num_hidden_layers=2, experts_implementation=experts_implementation)
    unused_expert(model)
    assert_flat(model, lambda: model(**tiny_batch(model, 2, 8), use_cache=False).loss, name)


@pytest.mark.parametrize("name", ["recompute operators", "offload", "quantize"])
def test_an_unused_vision_branch_leaves_nothing_over_twenty_steps(name: str) -> None:
    """19: features of a tower that runs inside forward and whose result the loss never uses."""
    model = tiny_model("mixtral", num_hidden_layers=2)
    tower = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    model.model.tower = tower
    kept: list[torch.Tensor] = []

    def look(module: Any, args: Any, output: torch.Tensor) -> None:
        kept[:] = [tower(output)]  # until the next step, as an attribute of a model would

    model.model.embed_tokens.register_forward_hook(look)

    def loss() -> torch.Tensor:
        value = model(**tiny_batch(model, 2, 8), use_cache=False).loss
        kept.clear()
        return value

    assert_flat(model, loss, name)


def assert_flat(model: Any, loss_of: Callable[[], torch.Tensor], name: str) -> None:
    store = OffloadStore(FileTier())
    parameters = [*model.parameters(), *model.buffers()]
    with instrumented(model):
        for number in range(20):
            ledger = Ledger()
            scope = Scope(
                ByFunction(STRATEGIES[name]),
                ledger,
                parameters=parameters,
                store=lambda: store,
                min_mitigated_bytes=1,
            )
            # Every tensor of the first and of the last step is counted; the ledger's counts are read in all.
            with live_bytes() if number in (0, 19) else nullcontext() as live:
                with scope.open():
                    loss = loss_of()
                store.settle()
                loss.backward()
                model.zero_grad(set_to_none=True)
                del loss, scope
            assert (ledger.held_bytes, ledger.recovered_bytes) == (0, 0)
            assert live is None or live.now() < 4096  # caches of a few numbers at most


# 22: addresses


@pytest.mark.parametrize("strategy", ALL)
def test_an_address_that_is_used_again_is_another_tensor(strategy: Strategy) -> None:
    """22: a temporary dies and the allocator gives its address to a tensor of the same size at once. Neither the
    strategy nor the value of the old one may stick to the new one."""
    side, numbers = 3072, range(1, 5)  # 36 MiB: in a heap of smaller holes, malloc need not give the same one again
    x = leaf(side, side)
    scope = scope_of(lambda site: strategy if site.name == "a" else Strategy.KEEP)
    addresses, total = [], x.sum() * 0
    with scope.open():
        for number in numbers:
            temporary = scope.run(A, lambda x, number=number: x * number, x)
            addresses.append(temporary.data_ptr())
            total = total + scope.run(B, lambda t: (t * t).sum(), temporary)
            del temporary
            other = torch.full((side, side), float(number))
            addresses.append(other.data_ptr())
            total = total + (x * other).sum()
            del other
    if strategy is Strategy.RECOMPUTE:
        assert len(set(addresses)) < len(addresses)  # the premise
    total.backward()
    assert x.grad is not None
    wanted = sum(2 * n * n * x.detach() + n for n in numbers)
    assert isinstance(wanted, torch.Tensor)
    assert float((x.grad - wanted).norm()) <= (0.01 if strategy is Strategy.QUANTIZE else 1e-6) * float(wanted.norm())


# 23: weights


@pytest.mark.parametrize("architecture", FAMILIES)
def test_demand_is_what_autograd_saves_without_the_weights(architecture: str) -> None:
    """23: linears save transposed weights, fused experts slices of a 3-D one, a tied head the embedding: all by
    reference. The demand that is counted is that of an independent look at autograd's saved tensors, without any
    weight."""
    model = tiny_model(architecture, num_hidden_layers=2)
    inputs = {**tiny_batch(model, 2, 8), "use_cache": False}
    weights = {storage_key(p) for p in [*model.parameters(), *model.buffers()]}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage_key(tensor) not in weights:
            saved[storage_key(tensor)] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs).loss
    wanted = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    del loss
    saved.clear()

    def body(forward: Forward) -> Iterator[torch.Tensor]:
        yield forward(**inputs).loss

    with instrumented(model):
        (ledger,) = outcome(model, body, STRATEGIES["keep"]).ledgers
    # The independent count keeps alive what savers on dead branches (a router's unused scores) gave back.
    assert 0.9 * wanted <= ledger.demand_bytes <= wanted


@pytest.mark.parametrize("strategy", ALL)
def test_views_of_weights_made_inside_operators_are_references(strategy: Strategy) -> None:
    """23: transposes, slices of experts, gathered copies that are views, tied names and a weight behind `.data`."""
    weights = nn.Parameter(torch.randn(4, 8, 8))
    x = leaf(6, 8)
    uses: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x @ weights[0],
        lambda x: x @ weights[1].t(),
        lambda x: x @ weights.unbind()[2],
        lambda x: x @ weights.view(32, 8)[8:16],
        lambda x: x @ weights.transpose(1, 2)[3],
        lambda x: torch.einsum("td,edf->tf", x, weights),
        lambda x: x @ weights.detach()[0],
        lambda x: x @ weights.data[1].t(),
    ]
    scope = scope_of(strategy, weights)
    with scope.open():
        total = sum(scope.run(A, use, x).sum() for use in uses)
        assert scope.ledger.held_bytes <= x.numel() * 4 * 9 + weights.numel() * 4 // 3
    assert all(value.num_bytes < weights.numel() * 4 for value in scope.trace.values)
    assert isinstance(total, torch.Tensor)
    total.backward()
    wanted = torch.autograd.grad(sum(use(x).sum() for use in uses), (x, weights))  # type: ignore[arg-type]
    for got, want in zip((x.grad, weights.grad), wanted, strict=True):
        assert got is not None
        assert_equal_or_near(strategy, got, want)


# 25: distributed tensors


def test_distributed_activations_are_kept_and_distributed_weights_refused() -> None:
    """25: a DTensor activation comes back with its placement under every strategy and is counted as left alone; a model
    with DTensor weights is refused with its name."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        x = torch.randn(6, 8)
        for placement in (Shard(0), Replicate()):
            for strategy in ALL:
                d = distribute_tensor(x, mesh, [placement]).requires_grad_()
                scope = scope_of(strategy)
                with scope.open():
                    y = scope.run(A, torch.sin, d)
                    loss = scope.run(B, lambda y: (y * y).sum(), y)
                loss.to_local().backward()
                assert isinstance(d.grad, DTensor) and d.grad.placements == (placement,)
                torch.testing.assert_close(d.grad.to_local(), 2 * x.sin() * x.cos())
                assert scope.ledger.num_unmanaged > 0
        model = tiny_model("mixtral", num_hidden_layers=2)
        head: Any = model.get_output_embeddings()
        head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(ValueError, match="lm_head"):
            refuse_unmanaged(model)
    finally:
        dist.destroy_process_group()


# 26: a policy that does nothing


class Hidden(torch.autograd.Function):
    """Keeps its input on ctx, out of reach of saved-tensor hooks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.x


@pytest.fixture
def runtime() -> Iterator[Callable[..., FlexRuntime]]:
    made: list[FlexRuntime] = []

    def make(model: Any, config: FlexConfig) -> FlexRuntime:
        made.append(FlexRuntime(config))
        with_fake_meter(made[-1])
        made[-1].attach(model)
        return made[-1]

    yield make
    for one in made:
        one.detach()


def train(runtime: FlexRuntime, model: Any, num_steps: int = 1, length: int = 24) -> None:
    for seed in range(num_steps):
        loss = model(**tiny_batch(model, 2, length, seed=seed), use_cache=False).loss
        with runtime.backward():
            loss.backward()
        model.zero_grad()


def test_a_plan_that_frees_nothing_says_so_once(runtime: Callable[..., FlexRuntime]) -> None:
    """26: mitigation is planned and every byte stays: one warning names the micro-batch; bytes per step are in the
    records."""
    model = tiny_model("mixtral", num_hidden_layers=2)
    one = runtime(model, FlexConfig(BASE_BYTES + 560_000, ("recompute",)))
    without_forecast(one)  # sizes and transients as the fake meter sees them, from the first micro-batch
    train(one, model)
    # From here on the engine sees nothing: what it would pack is out of its reach.
    original = Scope._hold

    def hold(self: Scope, entry: Any, tensor: torch.Tensor) -> Any:
        entry.region = None
        return original(self, entry, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Demand, "drop", lambda self, entry: None)
        patch.setattr(Scope, "_hold", hold)
        with pytest.warns(UserWarning, match=r"mitigates \d+ operators of micro-batch 1, which frees nothing"):
            train(one, model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(one, model)
    assert sum(one.records[0].freed_bytes.values()) > 0 == sum(one.records[1].freed_bytes.values())


def test_tensors_on_ctx_are_right_and_not_taken_for_freed(runtime: Callable[..., FlexRuntime]) -> None:
    """26: what a custom function hides on ctx is out of the engine's reach: gradients are right, and records do not
    claim bytes for it."""
    x = leaf(16, 16)
    for strategy in ALL:
        x.grad = None
        scope = scope_of(strategy)
        with scope.open():
            y = scope.run(A, Hidden.apply, x)
            loss = y.sum()
            del y
        assert sum(scope.ledger.freed_bytes.values()) == 0
        loss.backward()
        assert x.grad is not None and torch.equal(x.grad, 2 * x.detach())


# 29: passes that are no training


@pytest.mark.parametrize("kind", ["no_grad", "inference_mode", "without backward"])
def test_scoring_before_training_is_no_warm_up(runtime: Callable[..., FlexRuntime], kind: str) -> None:
    """29: a reference model's scores, or a forward whose loss is thrown away, teach nothing. Where sizes are learnt
    from real micro-batches, the first that is trained on is the profiling one, and the plan after it is that of a run
    without scoring."""
    records = []
    for is_scoring in (False, True):
        model = tiny_model("mixtral", num_hidden_layers=2)
        one = runtime(model, FlexConfig(BASE_BYTES + 560_000, ("recompute",)))
        without_forecast(one)
        if is_scoring:
            for seed in range(3):
                inputs = tiny_batch(model, 2, 24, seed=seed)
                if kind == "without backward":
                    model(**inputs, use_cache=False)
                else:
                    with torch.no_grad() if kind == "no_grad" else torch.inference_mode():
                        model(**inputs, use_cache=False)
        assert one.part().profile.version == 0
        train(one, model, 3)
        records.append(one.records)
    plain, scored = records
    assert len(scored) == 3 and [r.is_profile for r in scored] == [r.is_profile for r in plain]
    for ours, theirs in zip(scored, plain, strict=True):
        assert (ours.demand_bytes, ours.actual_bytes > 0) == (theirs.demand_bytes, True)


def test_a_loss_that_is_thrown_away_measures_nothing(runtime: Callable[..., FlexRuntime]) -> None:
    """29: its shape is traced before it runs, as any is. What is learnt from real runs, the correction of transients,
    stays as it was, and the first micro-batch with a backward is planned as in a run without scoring."""
    records = []
    for is_scoring in (False, True):
        model = tiny_model("mixtral", num_hidden_layers=2)
        one = runtime(model, FlexConfig(10**9, ("recompute",)))
        if is_scoring:
            versions = []
            for _ in range(2):
                model(**tiny_batch(model, 2, 24, seed=5), use_cache=False)
                versions.append(one.part().profile.version)
            assert not one.books.correction._seen and versions[0] == versions[1]
        train(one, model)
        assert one.books.correction._seen
        records.append(one.records)
    (plain,), (scored,) = records
    assert not plain.is_profile and not scored.is_profile
    assert (scored.predicted_bytes, scored.predicted_peak_bytes) == (plain.predicted_bytes, plain.predicted_peak_bytes)
