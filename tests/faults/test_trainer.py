"""Known faults around the Trainer: its detections fooled, adapters without gradients, families that differ."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer

from flex_trainer import FlexConfig, FlexTrainer, FlexTrainerMixin
from flex_trainer.activations.context import current_scope
from flex_trainer.cost.profile import Profile
from flex_trainer.models.discovery import discover, find_experts
from flex_trainer.provision.forecast import Forecast
from flex_trainer.runtime import FlexRuntime
from flex_trainer.strategy import LEAST_MOVED_BYTES, Strategy
from flex_trainer.testing.steps import instrumented
from flex_trainer.testing.tiny import FAMILIES, all_moe_architectures, tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter
from tests.faults.live_bytes import live_bytes
from tests.faults.outcomes import STRATEGIES, Forward, assert_same, outcome
from tests.runtime_steps import without_forecast
from tests.trainer_runs import Batches, arguments, losses

MODES: dict[str, tuple[str, ...]] = {
    "keep": (),
    "recompute": ("recompute",),
    "offload": ("offload",),
    "quantize": ("quantize",),
}


@pytest.fixture
def everything_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """No micro-batch is ever known, so each runs wholly under the one strategy that its config allows; however
    small."""
    from flex_trainer.activations.scope import Scope

    monkeypatch.setattr(Profile, "knows", lambda self, shape: False)
    monkeypatch.setattr(Forecast, "teach", lambda self, *_, **__: 0.0)
    defaults: dict[str, Any] = Scope.__init__.__kwdefaults__ or {}
    assert defaults["min_mitigated_bytes"] == LEAST_MOVED_BYTES
    monkeypatch.setitem(defaults, "min_mitigated_bytes", 1)


MOE_FAMILIES = [name for name in FAMILIES if name not in ("llama", "qwen3")]


def small(architecture: str = "qwen3_moe", **options: Any) -> Any:
    return tiny_model(architecture, num_hidden_layers=2, **options)


def with_adapters(base: Any, **choices: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **choices))


def trainer_on(
    directory: Path, model: Any, strategies: tuple[str, ...] | None, base: Any = None, **options: Any
) -> Any:
    """A plain Trainer when `strategies` is None, else a FlexTrainer with ample memory and these strategies."""
    own = options.pop("own", None)
    more = {name: options.pop(name) for name in ("compute_loss_func", "eval_dataset") if name in options}
    source = base or model

    def collate(samples: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        number = samples[0]["number"]
        batch = tiny_batch(source, 2, (10, 16, 12)[number % 3], padding=True, seed=number)
        return batch

    args = arguments(directory, **{"max_steps": 2, "gradient_accumulation_steps": 1, **options})
    given: dict[str, Any] = {"model": model, "args": args, "train_dataset": Batches(), "data_collator": collate, **more}
    if strategies is None:
        return (type("Plain", (own, Trainer), {}) if own else Trainer)(**given)
    trainer_class: Any = type("Flex", (own, FlexTrainerMixin, Trainer), {}) if own else FlexTrainer
    trainer = trainer_class(flex=FlexConfig(10**9, strategies), **given)
    with_fake_meter(trainer.flex)
    return trainer


# 35: what the Trainer detects


class OwnLoss:
    """compute_loss as users override it: with the labels taken out, and num_items_in_batch obeyed."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1).float()
        total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        loss = total / (num_items_in_batch if num_items_in_batch is not None else labels[:, 1:].ne(-100).sum())
        return (loss, outputs) if return_outputs else loss


class OldOwnLoss:
    """compute_loss with the signature of years ago."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def own_loss_func(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    total = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / (num_items_in_batch if num_items_in_batch is not None else labels[:, 1:].ne(-100).sum())


class WithoutKwargs(nn.Module):
    """A model whose forward takes no further keywords, so that the Trainer must scale the loss itself."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside
        self.config = inside.config
        self._no_split_modules = ["Qwen3MoeDecoderLayer"]

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        return self.inside(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


LOSSES: dict[str, dict[str, Any]] = {
    "model": {},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "compute_loss": {"own": OwnLoss},
    "old compute_loss": {"own": OldOwnLoss},
    "compute_loss_func": {"compute_loss_func": own_loss_func},
}


def plain_model() -> tuple[Any, Any]:
    model = small()
    return model, model


def adapted_model() -> tuple[Any, Any]:
    base = small()
    return with_adapters(base, target_modules=["q_proj", "o_proj"]), base


def model_without_kwargs() -> tuple[Any, Any]:
    base = small()
    return WithoutKwargs(base), base


SCALED = [
    *((plain_model, "model", accumulation) for accumulation in (1, 2)),
    (adapted_model, "compute_loss", 2),
    (model_without_kwargs, "label smoothing", 2),
    *(
        pytest.param(*case, marks=pytest.mark.sweep)
        for case in [
            *((plain_model, loss, 4) for loss in LOSSES),
            (adapted_model, "model", 2),
            *((model_without_kwargs, loss, 2) for loss in ("model", "compute_loss_func")),
        ]
    ),
]


@pytest.mark.parametrize(
    ("make_model", "loss", "accumulation"), SCALED, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_the_loss_is_scaled_as_the_trainer_scales_it(
    tmp_path: Path, everything_is_new: None, make_model: Callable[[], tuple[Any, Any]], loss: str, accumulation: int
) -> None:
    """35: losses of FlexTrainer under accumulation are those of Trainer, whatever the forward's signature,
    adapters, label smoothing or a loss of one's own make it detect."""
    runs = []
    for strategies in (None, ("recompute",)):
        model, base = make_model()
        options = {**LOSSES[loss], "gradient_accumulation_steps": accumulation}
        trainer = trainer_on(tmp_path / str(strategies), model, strategies, base, **options)
        trainer.train()
        runs.append(trainer)
    plain, flex = runs
    assert flex.model_accepts_loss_kwargs == plain.model_accepts_loss_kwargs == (make_model is not model_without_kwargs)
    assert losses(flex) == losses(plain) and len(losses(plain)) == 2
    for (name, ours), theirs in zip(flex.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert sum(record.freed_bytes["recompute"] for record in flex.flex.records) > 0


@pytest.mark.parametrize("make_model", [plain_model, adapted_model, model_without_kwargs], ids=lambda f: f.__name__)
def test_a_managed_model_looks_the_same_to_who_inspects_it(
    tmp_path: Path, make_model: Callable[[], tuple[Any, Any]]
) -> None:
    """35: signature, label names and what a second Trainer detects do not change while the runtime is attached."""
    model, base = make_model()
    before = trainer_on(tmp_path / "before", model, None, base)
    signature = inspect.signature(model.forward)
    runtime = FlexRuntime(FlexConfig(10**9))
    with_fake_meter(runtime)
    runtime.attach(model)
    try:
        assert inspect.signature(model.forward) == signature
        during = trainer_on(tmp_path / "during", model, None, base)
        for name in ("model_accepts_loss_kwargs", "label_names", "can_return_loss", "_loss_shifts_labels"):
            assert getattr(during, name) == getattr(before, name), name
        assert during._signature_columns == before._signature_columns
    finally:
        runtime.detach()


# 36: adapters


def attention_adapters() -> tuple[Any, Any]:
    base = small()
    return with_adapters(base, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.1), base


def fused_expert_adapters() -> tuple[Any, Any]:
    base = small()
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return with_adapters(base, target_modules=[], target_parameters=names), base


def adapters_of_everything() -> tuple[Any, Any]:
    base = small()
    modules = ["q_proj", "v_proj", "gate", "lm_head"]
    return with_adapters(base, target_modules=modules, target_parameters=["mlp.experts.down_proj"]), base


def late_adapters() -> tuple[Any, Any]:
    base = small()
    return with_adapters(base, target_modules=["o_proj"], layers_to_transform=[1]), base


def early_adapters() -> tuple[Any, Any]:
    base = small()
    return with_adapters(base, target_modules=["q_proj"], layers_to_transform=[0]), base


def decomposed_adapters() -> tuple[Any, Any]:
    base = small()
    return with_adapters(base, target_modules=["q_proj", "o_proj"], use_dora=True), base


def whole_modules_beside_adapters() -> tuple[Any, Any]:
    base = small()
    return with_adapters(base, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]), base


def prompts() -> tuple[Any, Any]:
    peft = pytest.importorskip("peft")
    base = small()
    torch.manual_seed(0)
    return peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)), base


def adapters_on_bf16() -> tuple[Any, Any]:
    base = small(dtype=torch.bfloat16)
    return with_adapters(base, target_modules=["q_proj", "o_proj"]), base


ADAPTED = (
    attention_adapters,
    fused_expert_adapters,
    adapters_of_everything,
    late_adapters,
    early_adapters,
    decomposed_adapters,
    whole_modules_beside_adapters,
    prompts,
    adapters_on_bf16,
)


@pytest.mark.parametrize(
    ("make_model", "inputs_require_grad"),
    [*((make, False) for make in ADAPTED), (attention_adapters, True), (fused_expert_adapters, True)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_trainable_tensor_gets_its_gradient(
    make_model: Callable[[], tuple[Any, Any]], inputs_require_grad: bool
) -> None:
    """36: adapters of early layers over frozen embeddings, on fused experts, on everything at once; with and without
    enable_input_require_grads; under every strategy."""
    model, base = make_model()
    if inputs_require_grad:
        model.enable_input_require_grads()
    inputs = {**tiny_batch(base, 2, 10, padding=True), "use_cache": False}
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any("embed_tokens" in name for name in trainable)

    def body(forward: Forward) -> list[torch.Tensor]:
        loss = forward(**inputs).loss
        loss.backward()
        return [loss]

    plain = outcome(model, body)
    assert plain.gradients.keys() == trainable
    with instrumented(model):
        for name, choose in STRATEGIES.items():
            assert_same(outcome(model, body, choose), plain, name)


@pytest.mark.parametrize(
    ("make_model", "mode"),
    [
        pytest.param(make, mode, marks=[] if mode == "recompute" else pytest.mark.sweep)
        for make, modes in ((attention_adapters, MODES), (fused_expert_adapters, ("keep", "recompute")))
        for mode in modes
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_adapters_train_in_the_trainer(
    tmp_path: Path, everything_is_new: None, make_model: Callable[[], tuple[Any, Any]], mode: str
) -> None:
    """36: the whole way through FlexTrainer: losses and adapters of the plain Trainer."""
    runs = []
    for strategies in (None, MODES[mode]):
        model, base = make_model()
        trainer = trainer_on(tmp_path / str(strategies), model, strategies, base, gradient_accumulation_steps=2)
        trainer.train()
        runs.append(trainer)
    plain, flex = runs
    if mode == "quantize":
        assert losses(flex) == pytest.approx(losses(plain), abs=0.02)
        return
    assert losses(flex) == losses(plain)
    for (name, ours), theirs in zip(flex.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


# 41: compiled layers


def test_a_compiled_layer_is_right_or_refused() -> None:
    """41: a part of the model that the user compiled. Its values may be out of reach, its gradients may not be
    wrong."""
    model = small()
    attention = model.model.layers[1].self_attn
    attention.o_proj = torch.compile(attention.o_proj, backend="aot_eager")
    inputs = {**tiny_batch(model, 2, 8), "use_cache": False}

    def body(forward: Forward) -> list[torch.Tensor]:
        loss = forward(**inputs).loss
        loss.backward()
        return [loss]

    plain = outcome(model, body)
    with instrumented(model):
        for name in ("keep", "recompute operators", "recompute blocks", "offload"):
            assert_same(outcome(model, body, STRATEGIES[name]), plain, name)


def test_an_operator_that_takes_another_path_on_recompute_is_reported() -> None:
    """41: a graph that changes between the first run and the recomputation ends in an error that names the operator."""

    class Warming(nn.Module):
        def __init__(self, inside: nn.Module) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inside(x)
            return torch.sin(y).exp() if current_scope() is not None else y * 1

    model = small()
    attention = model.model.layers[1].self_attn
    attention.o_proj = Warming(attention.o_proj)
    inputs = {**tiny_batch(model, 2, 8), "use_cache": False}

    def body(forward: Forward) -> list[torch.Tensor]:
        loss = forward(**inputs).loss
        loss.backward()
        return [loss]

    with instrumented(model), pytest.raises(RuntimeError, match=r"layers\.1\.self_attn.* another path"):
        outcome(model, body, STRATEGIES["recompute operators"])


# 42: evaluation


class Few(Batches):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples


def test_evaluation_memory_does_not_grow_with_the_set(tmp_path: Path) -> None:
    """42: a set six times as large leaves as much behind and peaks as high: nothing of the engine runs in
    evaluation."""
    trainer = trainer_on(tmp_path, small(), ("recompute",), eval_dataset=Few(2), prediction_loss_only=True)
    trainer.train()
    plugin, model = trainer._plugin, trainer.model
    plugin.attach(trainer.accelerator, model)
    measured = {}
    try:
        for num_samples in (2, 12):
            with live_bytes(has_peak=True) as live:
                trainer.evaluate(Few(num_samples))
                measured[num_samples] = (live.now(), live.peak_bytes)
            assert trainer.flex.in_flight == [] and trainer.flex.running is None
    finally:
        plugin.detach()
    # The loss of each batch is kept by the Trainer: a few numbers.
    assert measured[12][0] - measured[2][0] < 4096
    assert measured[12][1] <= 1.1 * measured[2][1]


# 43: counts


@pytest.mark.parametrize("architecture", sorted({*MOE_FAMILIES, *all_moe_architectures()[::4]}))
def test_counts_come_from_the_chosen_experts_in_every_family(architecture: str) -> None:
    """43: routers give logits, probabilities, tuples or nothing; what is counted are the indices that the experts
    get."""
    model = tiny_model(architecture)
    experts = {operator.module: operator.site for operator in discover(model).experts}
    assert experts
    runtime = FlexRuntime(FlexConfig(10**9))
    with_fake_meter(runtime)
    given: dict[str, list[torch.Tensor]] = {}
    for module, site in experts.items():
        module.register_forward_pre_hook(
            lambda module, args, kwargs, name=site.name: given.__setitem__(
                name, [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.dtype == torch.int64]
            ),
            with_kwargs=True,
        )
    runtime.attach(model)
    without_forecast(runtime)
    try:
        batch = tiny_batch(model, 2, 8)
        loss = model(**batch).loss
        (micro_batch,) = runtime.in_flight
        rows, counts = dict(micro_batch.routed_pairs), [count for count, _ in micro_batch._counts]
        imbalance = micro_batch.record(0).imbalance
        del loss, micro_batch
    finally:
        runtime.detach()
    assert rows.keys() == given.keys() and rows
    for name, tensors in given.items():
        (index,) = [t for t in tensors if t.dim() == 2] or [None]
        assert index is not None and rows[name] == index.numel(), name
    if counts:
        independent = [
            torch.bincount(next(t for t in tensors if t.dim() == 2).flatten(), minlength=len(count))
            for tensors, count in zip(given.values(), counts, strict=True)
        ]
        assert all(torch.equal(a, b) for a, b in zip(counts, independent, strict=True))
        worst = max(float(count.max() / count.float().mean()) for count in independent)
        assert imbalance == pytest.approx(worst)


# 44: nothing found


def test_fused_experts_are_found_in_every_family() -> None:
    """44: experts in 3-D parameters, which nothing written for Linear matches, are sites with five operators inside."""
    for architecture in ("qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral", "glm4_moe"):
        model = tiny_model(architecture)
        assert any(parameter.dim() == 3 for experts in find_experts(model) for parameter in experts.parameters())
        batch = {**tiny_batch(model, 1, 6), "use_cache": False}

        def body(forward: Forward, batch: Any = batch) -> list[torch.Tensor]:
            loss = forward(**batch).loss
            loss.backward()
            return [loss]

        kinds = ("expert_permute", "expert_up", "expert_activation", "expert_down", "expert_unpermute")
        with instrumented(model):
            for kind in kinds:
                got = outcome(model, body, lambda site, k=kind: Strategy.RECOMPUTE if site.kind == k else Strategy.KEEP)
                assert got.num_recomputes > 0, (architecture, kind)


def test_a_model_without_anything_to_manage_is_refused_with_what_it_has() -> None:
    """44: no match is an error, and the error lists what the model consists of."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv1d(4, 4, 3)
            self.stack = nn.ModuleList([nn.TransformerEncoderLayer(8, 2) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.stem(x)

    with pytest.raises(ValueError, match="Odd has no decoder layers") as caught:
        FlexRuntime(FlexConfig(BASE_BYTES * 1000)).attach(Odd())
    assert "TransformerEncoderLayer" in str(caught.value)
