"""FlexTrainer trains what Trainer trains, to the bit, inside a limit; and says clearly what it cannot do."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from flex_trainer import FlexConfig, FlexTrainer, FlexTrainerMixin
from flex_trainer.activations.context import current_scope
from flex_trainer.testing.tiny import tiny_batch, tiny_model
from tests.fake_meter import BASE_BYTES, with_fake_meter
from tests.tiers import first_quick, sweep_over
from tests.trainer_runs import LENGTHS, LIMIT_BYTES, Batches, assert_same_run, collate_for, losses, make

pytestmark = pytest.mark.usefixtures("deterministic")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    trainer = make(tmp_path_factory.mktemp("plain"), None)
    trainer.train()
    return trainer


@pytest.mark.parametrize("planner", sweep_over(["optimal", "bandwidth", "largest_first"], quick=["optimal"]))
@pytest.mark.parametrize(
    "strategies", [("recompute",), ("offload",), pytest.param(("recompute", "offload"), marks=pytest.mark.sweep)]
)
def test_run_under_a_limit_equals_the_plain_run(
    tmp_path: Path, plain: Trainer, strategies: tuple[str, ...], planner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Copies on their way may hold 16 MiB or more, all of this model; make it a part of it, as it is elsewhere.
    monkeypatch.setattr("flex_trainer.config._LEAST_IN_FLIGHT_BYTES", 2**17)
    # What is on its way down or up counts too, so offload alone needs more room.
    limit_bytes = LIMIT_BYTES + 450_000 * (strategies == ("offload",))
    trainer = make(tmp_path, FlexConfig(limit_bytes, strategies, planner=planner))
    trainer.train()
    assert_same_run(trainer, plain)
    records = trainer.flex.records
    planned = [record for record in records if not record.is_profile]
    assert len(records) == 12 and len(planned) >= 6
    assert any(sum(record.freed_bytes.values()) > 0 for record in planned)
    for record in planned:
        assert record.actual_bytes < record.demand_bytes or not record.is_spike
        # Exact but for index vectors of a few bytes.
        assert abs(record.predicted_bytes - record.actual_bytes) < 0.005 * record.actual_bytes + 500
        assert {name for name, num in record.freed_bytes.items() if num} <= set(strategies)
    assert not trainer.flex.is_attached


def test_records_say_what_happened(tmp_path: Path) -> None:
    trainer = make(tmp_path, FlexConfig(LIMIT_BYTES))
    trainer.train()
    records = trainer.flex.records
    assert [record.micro_batch for record in records] == list(range(12))
    assert [record.step for record in records] == [i // 2 for i in range(12)]
    assert {record.num_tokens for record in records} <= {2 * length for length in LENGTHS}
    assert not any(record.is_profile for record in records)  # all were planned, the first one too
    assert records[0].trace_ms > 0
    for record in records:
        assert record.limit_bytes == LIMIT_BYTES == trainer.flex.limit_bytes
        assert record.baseline_bytes == BASE_BYTES
        assert record.baseline_bytes < record.peak_bytes <= record.limit_bytes
        assert not record.is_over_limit
        assert 0 < record.actual_bytes <= record.demand_bytes
        assert 1.0 <= record.imbalance <= 8.0
        assert 0 <= record.plan_ms < record.step_ms
        assert record.num_replans == 0
        assert record.is_spike == (record.demand_bytes > record.budget_bytes)
        if not record.is_profile:
            assert record.predicted_bytes <= record.budget_bytes
            assert record.predicted_peak_bytes >= record.peak_bytes
    # The same number of tokens asks for the same bytes, whatever was done about them.
    demands: dict[int, set[int]] = {}
    for record in records:
        demands.setdefault(record.num_tokens, set()).add(record.demand_bytes)
    assert all(len(of_size) == 1 for of_size in demands.values())


def test_ample_memory_mitigates_nothing(tmp_path: Path, plain: Trainer) -> None:
    trainer = make(tmp_path, FlexConfig(10**9))
    trainer.train()
    assert_same_run(trainer, plain)
    planned = [record for record in trainer.flex.records if not record.is_profile]
    assert planned and all(not any(record.freed_bytes.values()) for record in planned)
    assert all(record.actual_bytes == record.demand_bytes == record.predicted_bytes for record in planned)


def test_no_strategies_means_watching(tmp_path: Path, plain: Trainer) -> None:
    trainer = make(tmp_path, FlexConfig(10**9, strategies=()))
    trainer.train()
    assert_same_run(trainer, plain)
    assert all(record.actual_bytes == record.demand_bytes for record in trainer.flex.records)


def test_quantize_trains_to_nearly_the_same_losses(tmp_path: Path, plain: Trainer) -> None:
    trainer = make(tmp_path, FlexConfig(BASE_BYTES + 1_300_000, ("quantize",)))
    trainer.train()
    assert sum(record.freed_bytes["quantize"] for record in trainer.flex.records) > 0
    assert losses(trainer)[0] == losses(plain)[0]  # forward is exact
    assert losses(trainer) == pytest.approx(losses(plain), abs=0.02)


# What Trainer does besides


class Evaluating(FlexTrainer):
    """Looks at the runtime in every evaluation step."""

    num_evaluations = 0

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        before = len(self.flex.records), len(self.flex.in_flight)
        result = super().prediction_step(*args, **kwargs)
        assert current_scope() is None
        assert (len(self.flex.records), len(self.flex.in_flight)) == before
        self.num_evaluations += 1
        return result


def test_evaluation_in_between_leaves_no_trace(tmp_path: Path, plain: Trainer) -> None:
    class FewBatches(Batches):
        def __len__(self) -> int:
            return 3

    trainer = make(
        tmp_path,
        FlexConfig(LIMIT_BYTES),
        trainer_class=Evaluating,
        options={"eval_dataset": FewBatches()},
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    assert trainer.num_evaluations == 9
    assert_same_run(trainer, plain)
    assert len(trainer.flex.records) == 12


def test_generation_inside_training(tmp_path: Path) -> None:
    class Generating(FlexTrainerMixin, Trainer):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(model, *args, **kwargs)
            num_records = len(self.flex.records)
            prompt = tiny_batch(model, 1, 8)["input_ids"]
            generated = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
            assert generated.shape == (1, 12) or generated.shape[1] <= 12
            assert len(self.flex.records) == num_records
            return loss

    trainer = make(tmp_path, FlexConfig(LIMIT_BYTES), trainer_class=Generating, max_steps=3)
    trainer.train()
    assert len(trainer.flex.records) == 6


class OwnLoss:
    """A loss of one's own, as users write it: the model's logits, twice the cross-entropy, without labels in
    forward."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        loss = 2 * nn.functional.cross_entropy(logits.float(), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


class PlainOwnLoss(OwnLoss, Trainer):
    pass


class FlexOwnLoss(OwnLoss, FlexTrainerMixin, Trainer):
    pass


def own_loss_func(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(logits.float(), labels[:, 1:].flatten(), reduction="sum")
    return total / (num_items_in_batch if num_items_in_batch is not None else labels[:, 1:].numel())


@pytest.mark.parametrize(
    ("plain_class", "flex_class", "options", "argument_options"),
    [
        pytest.param(PlainOwnLoss, FlexOwnLoss, {}, {}, id="compute_loss"),
        pytest.param(
            Trainer,
            FlexTrainer,
            {"compute_loss_func": own_loss_func},
            {},
            id="compute_loss_func",
            marks=pytest.mark.sweep,
        ),
        pytest.param(Trainer, FlexTrainer, {}, {"label_smoothing_factor": 0.1}, id="label_smoothing"),
        pytest.param(Trainer, FlexTrainer, {}, {"bf16": True}, id="bf16_autocast"),
        pytest.param(
            Trainer,
            FlexTrainer,
            {},
            {"max_grad_norm": 0.1, "lr_scheduler_type": "cosine"},
            id="clipping",
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_other_losses_and_settings(
    tmp_path: Path,
    plain_class: Any,
    flex_class: Any,
    options: dict[str, Any],
    argument_options: dict[str, Any],
) -> None:
    reference = make(
        tmp_path / "plain", None, trainer_class=plain_class, options=options, max_steps=4, **argument_options
    )
    reference.train()
    trainer = make(
        tmp_path / "flex",
        FlexConfig(BASE_BYTES + 1_350_000),
        trainer_class=flex_class,
        options=options,
        max_steps=4,
        **argument_options,
    )
    trainer.train()
    assert_same_run(trainer, reference)
    assert sum(sum(record.freed_bytes.values()) for record in trainer.flex.records if not record.is_profile) > 0


def test_model_init(tmp_path: Path, plain: Trainer) -> None:
    collate = collate_for(tiny_model("mixtral"))
    options = {"model": None, "model_init": lambda: tiny_model("mixtral"), "data_collator": collate}
    trainer = make(tmp_path, FlexConfig(LIMIT_BYTES), options=options)
    trainer.train()
    assert_same_run(trainer, plain)
    assert len(trainer.flex.records) == 12


def test_resume_from_a_checkpoint_equals_the_run_in_one_go(tmp_path: Path) -> None:
    # A family whose checkpoint has the names of the modules: Trainer (5.24) reads others back incompletely.
    flex = FlexConfig(LIMIT_BYTES)
    saving: dict[str, Any] = {
        "family": "gpt_oss",
        "save_strategy": "steps",
        "save_steps": 3,
        "lr_scheduler_type": "constant",
    }
    whole = make(tmp_path / "whole", flex, **saving)
    whole.train()
    second = make(tmp_path / "resumed", flex, **saving)
    second.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(second) == losses(whole)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name
    assert [record.step for record in second.flex.records] == [3, 3, 4, 4, 5, 5]


def test_training_twice_with_one_trainer(tmp_path: Path) -> None:
    trainer = make(tmp_path, FlexConfig(LIMIT_BYTES), max_steps=2)
    trainer.train()
    trainer.train()
    assert [record.micro_batch for record in trainer.flex.records] == list(range(8))
    assert sum(record.is_profile for record in trainer.flex.records[4:]) <= 1  # what was learnt stays


def test_exception_in_the_loss_then_training_goes_on(tmp_path: Path, plain: Trainer) -> None:
    class Failing(FlexTrainer):
        failures = 1

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(model, inputs, *args, **kwargs)
            if self.failures and self.state.global_step == 2:
                self.failures -= 1
                raise ArithmeticError("the loss is cursed")
            return result

    trainer = make(tmp_path, FlexConfig(LIMIT_BYTES), trainer_class=Failing)
    with pytest.raises(ArithmeticError, match="cursed"):
        trainer.train()
    assert not trainer.flex.is_attached and current_scope() is None
    assert all("forward" not in vars(module) for module in trainer.model.modules())
    num_before = len(trainer.flex.records)
    assert num_before == 4
    trainer.train()
    assert len(trainer.flex.records) == num_before + 12


def test_peft_adapters_get_the_gradients_of_the_plain_run(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], lora_dropout=0.1)
        return peft.get_peft_model(tiny_model("mixtral"), config)

    collate = collate_for(tiny_model("mixtral"))
    runs = []
    for flex in (None, FlexConfig(BASE_BYTES + 1_000_000)):
        options = {"model": adapted(), "data_collator": collate}
        trainer = make(tmp_path / str(flex is None), flex, options=options, max_steps=4)
        trainer.train()
        runs.append(trainer)
    assert_same_run(runs[1], runs[0])
    assert sum(sum(record.freed_bytes.values()) for record in runs[1].flex.records if not record.is_profile) > 0


def test_trl_sft_trainer(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset as ArrowDataset

    class FlexSFTTrainer(FlexTrainerMixin, trl.SFTTrainer):
        pass

    samples = ArrowDataset.from_dict({"input_ids": [list(range(3, 3 + 24 + i % 8)) for i in range(16)]})
    runs = []
    # TRL computes its loss in chunks of a fixed size, which take 8 MiB beside a model as small as this one.
    for flex in (None, FlexConfig(LIMIT_BYTES + 8_000_000)):
        model = tiny_model("qwen3_moe")
        args = trl.SFTConfig(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            gradient_checkpointing=False,
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        from transformers import ByT5Tokenizer

        common = {"model": model, "args": args, "train_dataset": samples, "processing_class": ByT5Tokenizer()}
        trainer = trl.SFTTrainer(**common) if flex is None else FlexSFTTrainer(flex=flex, **common)
        if flex is not None:
            with_fake_meter(trainer.flex)
        trainer.train()
        runs.append(trainer)
    assert_same_run(runs[1], runs[0])
    assert len(runs[1].flex.records) == 3


# What wins


@pytest.mark.parametrize("name", first_quick(["gradient_checkpointing", "activation_checkpointing"]))
def test_checkpointing_is_turned_off_with_a_warning(tmp_path: Path, plain: Trainer, name: str) -> None:
    if name not in TrainingArguments.__dataclass_fields__:
        pytest.skip(f"this transformers has no {name}")
    seen: list[bool] = []

    class Watching(FlexTrainer):
        def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(model, *args, **kwargs)
            seen.append(any(getattr(module, "gradient_checkpointing", False) for module in model.modules()))
            return loss

    trainer = make(tmp_path, FlexConfig(LIMIT_BYTES), trainer_class=Watching, arguments_options={name: True})
    with pytest.warns(UserWarning, match=r"gradient checkpointing is on; FlexTrainer decides"):
        trainer.train()
    assert seen == [False] * 12
    assert_same_run(trainer, plain)


def test_no_warning_without_checkpointing(tmp_path: Path) -> None:
    trainer = make(tmp_path, FlexConfig(LIMIT_BYTES), max_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.train()
