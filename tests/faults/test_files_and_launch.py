"""Known faults of files, launches, trackers and measurements, and of rows that belong to other ranks."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from flex_trainer.activations.ledger import Ledger
from flex_trainer.activations.scope import Scope
from flex_trainer.callbacks.values import FlexLog, flex_logs, reduce_over_ranks
from flex_trainer.compat import grouped_linear
from flex_trainer.experts.operators import run_plainly
from flex_trainer.launch.accelerate import accelerate_settings
from flex_trainer.launch.build import build_model, build_tokenizer, check_recipe, training_arguments
from flex_trainer.launch.recipe import Recipe, load_recipe
from flex_trainer.launch.yaml import RecipeError
from flex_trainer.memory.cuda_meter import CudaMeter
from flex_trainer.memory.enforce import return_freed_memory
from flex_trainer.memory.process_meter import ProcessMeter
from flex_trainer.models.discovery import find_experts
from flex_trainer.models.experts import part_sites, run_in_scope, split_experts_forward
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.fake_runtime import FakeRuntime, make_record
from flex_trainer.testing.steps import ByFunction
from flex_trainer.testing.tiny import tiny_model
from tests.fake_cuda import FakeCuda

SITES = part_sites(Site("experts", "experts", 0, is_block=True))
MIB = 2**20
CUDA = torch.device("cuda", 1)


# 49: rows of other ranks


@pytest.mark.parametrize("strategy", [None, *Strategy], ids=lambda s: "plain" if s is None else s.value)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_rows_of_other_ranks_are_masked_before_any_sum_or_scale(
    architecture: str, strategy: Strategy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """49: under expert parallelism the rows behind this rank's last one are never computed and hold whatever was in
    memory, here NaN. They reach neither output, nor gradient, nor a scale: results are those of this rank's rows
    alone."""
    experts: Any = next(iter(find_experts(tiny_model(architecture, num_hidden_layers=2))))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=generator)
    index = torch.randint(0, 8, (64, 2), generator=generator)
    index[::3, 0] = 8  # experts of other ranks
    index[5] = 8  # a token with none of ours
    weights = torch.rand(64, 2, generator=generator)

    def with_garbage(rows: torch.Tensor, weight: Any, offsets: torch.Tensor, **options: Any) -> torch.Tensor:
        result = grouped_linear(rows, weight, offsets, **options)
        is_computed = torch.arange(len(result)) < offsets[-1]
        return torch.where(is_computed[:, None], result, torch.nan)

    def run(garbage: bool) -> tuple[list[torch.Tensor], Ledger]:
        experts.zero_grad(set_to_none=True)
        inputs = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
        scope = Scope(
            ByFunction(lambda site: strategy or Strategy.KEEP),
            Ledger(),
            parameters=experts.parameters(),
            store=_store,
            min_mitigated_bytes=1,
        )
        monkeypatch.setattr("flex_trainer.experts.grouped.grouped_linear", with_garbage if garbage else grouped_linear)
        if strategy is None or not garbage:
            output = split_experts_forward(experts, run_plainly, inputs[0], index, inputs[1])
        else:
            with scope.open():
                output = split_experts_forward(
                    experts, functools.partial(run_in_scope, SITES), inputs[0], index, inputs[1]
                )
        (output * output.detach().cos()).sum().backward()
        gradients = [tensor.grad for tensor in (*inputs, *experts.parameters()) if tensor.grad is not None]
        return [output.detach(), *gradients], scope.ledger

    monkeypatch.setattr(experts, "_is_expert_parallel", True)
    (clean, _), (dirty, ledger) = run(garbage=False), run(garbage=True)
    assert torch.isfinite(torch.cat([tensor.flatten() for tensor in dirty])).all()
    assert not dirty[0][5].any() and len(dirty) >= 5
    for got, wanted in zip(dirty, clean, strict=True):
        if strategy is Strategy.QUANTIZE:
            assert float((got - wanted).norm()) <= 0.05 * float(wanted.norm())
        else:
            assert torch.equal(got, wanted)
    if strategy is Strategy.QUANTIZE:
        assert ledger.freed_bytes["quantize"] > 0  # masked rows are zeros, so the others can be quantized


def _store() -> Any:
    from flex_trainer.activations.file_tier import FileTier
    from flex_trainer.activations.offload import OffloadStore

    return OffloadStore(FileTier())


# 50: configurations

RECIPE = """
model:
  architecture: qwen3_moe
  config: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16,
           moe_intermediate_size: 16, intermediate_size: 32, num_experts: 4, num_experts_per_tok: 2}
data: {name: stdlib, sequence_length: 64, domains: [data]}
training: {max_steps: 3, per_device_train_batch_size: 2, use_cpu: true}
accelerate: {distributed_type: 'NO', num_processes: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path):
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)

    def load(*overrides: str) -> Recipe:
        return load_recipe(str(path), [f"training.output_dir={tmp_path / 'out'}", *overrides])

    return load


def check_all(recipe: Recipe) -> None:
    check_recipe(recipe)
    training_arguments(recipe)
    accelerate_settings(recipe)


@pytest.mark.parametrize(
    ("override", "place", "remedy"),
    [
        ("flex.memory_limt=1GiB", "flex.memory_limt", "did you mean 'memory_limit'"),
        ("flex.strategy=[offload]", "flex.strategy", "did you mean 'strategies'"),
        ("flex.strategies=[ofload]", "'ofload'", "did you mean 'offload'"),
        ("flex.planner=bandwith", "planner='bandwith'", "did you mean 'bandwidth'"),
        ("flex.enforce_limit='true'", "flex.enforce_limit", "write true unquoted"),
        ("model.config.num_expert=4", "model.config.num_expert", "did you mean 'num_experts'"),
        ("model.config.use_cache='False'", "model.config.use_cache", "write false unquoted"),
        ("model.config.model_type=mixtral", "model.config.model_type", "this model is 'qwen3_moe'"),
        ("model.config.kv_lora_rank=4", "model.config.kv_lora_rank", "Qwen3MoeConfig has no such key"),
        ("model.atn_implementation=sdpa", "model.atn_implementation", "did you mean 'attn_implementation'"),
        ("model.revision=main", "model", "revision='main' only applies to name_or_path"),
        ("model.trust_remote_code='true'", "model.trust_remote_code", "write true unquoted"),
        ("data.sequence_lenght=64", "data.sequence_lenght", "did you mean 'sequence_length'"),
        ("data.config=en", "data", "config='en' only applies to a named dataset"),
        ("data.split=test", "data", "split='test' only applies to a named dataset"),
        ("data.text_column=body", "data", "text_column='body' does not apply to name: stdlib"),
        ("training.gradient_acumulation_steps=2", "training.gradient_acumulation_steps", "did you mean"),
        ("training.bf16='true'", "training.bf16", "write true unquoted"),
        ("training.max_steps='3'", "training.max_steps", "int is needed"),
        ("accelerate={distributed_type: 'NO', num_proceses: 1}", "accelerate.num_proceses", "did you mean"),
        (
            "accelerate={distributed_type: FSDP, fsdp_config: {fsdp_verion: 2}}",
            "accelerate.fsdp_config.fsdp_verion",
            "did you mean",
        ),
        ("accelerate={distributed_type: false}", "accelerate.distributed_type", "write 'NO' in quotes"),
        ("accelerate={distributed_type: MULTI_CPU, num_processes: 2}", "accelerate.num_processes", "MULTI_GPU"),
        ("accelerate={distributed_type: 'NO', use_cpu: 'True'}", "accelerate.use_cpu", "write true unquoted"),
        ("parallels.ep=1", "parallels", "did you mean 'parallel'"),
        ("parallel.ep=0", "parallel", "ep=0 must be at least 1"),
        ("report.too=[wandb]", "report.too", "did you mean 'to'"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place_and_the_remedy(
    recipe: Any, override: str, place: str, remedy: str
) -> None:
    """50: misspelt keys, quoted booleans and numbers, settings that would be ignored and values of another model: one
    line with the file, the key, and the nearest right one."""
    with pytest.raises(RecipeError) as caught:
        check_all(recipe(override))
    message = str(caught.value)
    assert message.startswith("tiny.yaml: ") and "\n" not in message
    assert place in message and remedy in message


def test_the_recipe_itself_is_fine(recipe: Any) -> None:
    """50: the premise of the test above."""
    check_all(recipe())


# 51: bf16


@pytest.mark.parametrize("setting", ["training.bf16=true", "training.bf16_full_eval=true", "model.dtype=bfloat16"])
def test_bf16_on_a_gpu_without_it_is_refused(recipe: Any, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """51: torch says yes to bf16 also where it is only emulated; asked for there, it is refused by name."""
    monkeypatch.setattr(TrainingArguments, "device", torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Old GPU")
    with pytest.raises(RecipeError, match=r"tiny\.yaml: \S+: Old GPU has no bfloat16; use float32"):
        training_arguments(recipe(setting))
    training_arguments(recipe())  # without bf16 there is nothing to refuse


def test_bf16_where_no_device_can_is_refused(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """51: neither a GPU nor the CPU asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: False)
    with pytest.raises(RecipeError, match=r"tiny\.yaml: training: .*bf16"):
        training_arguments(recipe("training.bf16=true", "training.use_cpu=false"))


def test_fp16_on_a_cpu_is_refused(recipe: Any) -> None:
    """51: the neighbour: float16 autocast that a CPU does not train in."""
    with pytest.raises(RecipeError, match=r"tiny\.yaml: training\.fp16: a CPU has no float16 training"):
        training_arguments(recipe("training.fp16=true"))


def test_bf16_on_a_cpu_is_bf16(recipe: Any) -> None:
    """51: what was asked for is what is done."""
    asked = recipe("training.bf16=true", "model.dtype=bfloat16")
    assert training_arguments(asked).bf16
    model = build_model(asked, build_tokenizer(asked))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


# 52: trackers (one run, one process, resumed totals: tests/callbacks)


def test_a_row_of_all_ranks_names_the_rank_of_the_peak_and_adds_counts() -> None:
    """52: a spike on the third rank alone is visible on the first: largest values, summed counts, the rank's number."""
    rows = []
    for rank in range(4):
        unusual: dict[str, Any] = {"peak_bytes": 3 * 2**30, "is_spike": True} if rank == 2 else {}
        rows.append(flex_logs([make_record(6), make_record(7, **unusual)], 2 * 2**30))
    reduced = reduce_over_ranks(rows)
    assert (reduced["flex/memory/peak_rank"], reduced["flex/memory/peak_micro_batch"]) == (2, 7)
    assert (reduced["flex/memory/peak_gib"], reduced["flex/spike/count"]) == (3.0, 1)
    assert reduced["flex/spike/over_limit_count"] == 1


def test_totals_go_on_after_a_resume_and_no_micro_batch_is_in_two_rows() -> None:
    """52: a resumed run goes on from the newest row that has totals, with rows of evaluation after it."""
    runtime = FakeRuntime({0: {"is_spike": True}, 2: {"is_spike": True}})
    log = FlexLog(runtime)
    history = [{"loss": 1.0, "flex/spike/total": 5, "flex/spike/over_limit_total": 1}, {"eval_loss": 1.0}]
    log.restart(history)
    totals = []
    for _ in range(3):
        runtime.run_one()
        totals.append(log.values()["flex/spike/total"])
    assert totals == [6, 6, 7] and log.values() == {}


# 53: names


def test_no_two_kinds_of_memory_share_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """53: allocated, reserved and device memory on CUDA, process memory on a CPU; plans on CUDA are in allocated
    bytes, and what they may use is never more than the device really has left."""
    _fake_cuda(monkeypatch, allocated=3 * MIB, reserved=8 * MIB, free=5 * MIB)
    meter = CudaMeter(CUDA)
    assert meter.now() == {"allocated": 3 * MIB, "reserved": 8 * MIB, "device": 100 * MIB - 5 * MIB}
    assert meter.in_use_bytes() == 3 * MIB
    # Free, in whole segments of 2 MiB, and reserved but not allocated.
    assert meter.left_bytes(50 * MIB) == 4 * MIB + 8 * MIB - 3 * MIB
    assert meter.left_bytes(6 * MIB) == 3 * MIB
    assert set(ProcessMeter().now()) == {"process"}


# 54: windows


def _fake_cuda(monkeypatch: pytest.MonkeyPatch, allocated: int, reserved: int, free: int) -> FakeCuda:
    def refuse(*_: Any) -> None:
        raise AssertionError("a shared counter was reset")

    for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    same = dict.fromkeys(("allocated", "requested", "active", "peak"), allocated)
    return FakeCuda(**same, reserved=reserved, free=free, total=100 * MIB).install(monkeypatch)


def test_windows_on_cuda_reset_no_shared_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """54: a warm-up before the window is not in its peak, a measurement nested in another leaves the outer peak
    alone, and no peak is below what was in use when its window began."""
    cuda = _fake_cuda(monkeypatch, allocated=10 * MIB, reserved=90 * MIB, free=5 * MIB)

    def use(num_bytes: int, *meters: CudaMeter) -> None:
        cuda.allocated = cuda.requested = cuda.active = num_bytes
        cuda.peak = max(cuda.peak, num_bytes)
        for meter in meters:
            meter._next_sample = 0.0
            meter.sample()

    use(80 * MIB)  # the warm-up
    use(10 * MIB)
    outer, inner = CudaMeter(CUDA), CudaMeter(CUDA)
    outer.start_window()
    assert outer.peak_bytes() == 10 * MIB and not outer.is_peak_exact()
    use(40 * MIB, outer)
    use(15 * MIB, outer)
    inner.start_window()
    use(20 * MIB, outer, inner)
    use(12 * MIB)
    assert inner.peak_bytes() == 20 * MIB
    inner.end_window()
    assert outer.peak_bytes() == 40 * MIB
    use(85 * MIB)  # above every counter so far: now the counter itself is the peak, sampled or not
    use(12 * MIB)
    assert outer.peak_bytes() == 85 * MIB and outer.is_peak_exact()


def test_windows_of_the_process_do_not_disturb_each_other() -> None:
    """54: the same for the process: the inner window neither sees the outer one's peak nor ends it."""
    return_freed_memory()
    outer, inner = ProcessMeter(), ProcessMeter()
    outer.start_window()
    start = outer.in_use_bytes()
    large = torch.ones(48 * MIB // 4)
    outer.sample()
    del large
    return_freed_memory()
    inner.start_window()
    small = torch.ones(8 * MIB // 4)
    inner.sample()
    del small
    inner_peak = inner.peak_bytes()
    inner.end_window()
    assert inner_peak - start < 32 * MIB
    assert outer.peak_bytes() - start > 40 * MIB
    assert outer.peak_bytes() >= start and inner_peak >= 0
    outer.end_window()
