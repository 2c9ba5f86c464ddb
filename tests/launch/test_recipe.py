"""Reading recipes: what is accepted, and what every mistake is told."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flex_trainer.launch.recipe import load_recipe
from flex_trainer.launch.yaml import RecipeError

SAMPLE = """
model: {architecture: deepseek_v3, config: {hidden_size: 64, num_hidden_layers: 2}}
data: {name: stdlib, sequence_length: 256, domains: [code, prose]}
training: {max_steps: 6, per_device_train_batch_size: 4, learning_rate: 3e-4, save_strategy: no}
flex: {memory_limit: 1.6GiB, strategies: [recompute, offload]}
parallel: {fsdp: 1, ep: 1, pp: 1}
accelerate: cpu_1proc
report: {html: report.html, to: [wandb]}
"""


@pytest.fixture
def sample(tmp_path: Path) -> str:
    path = tmp_path / "sample.yaml"
    path.write_text(SAMPLE)
    return str(path)


def test_sections_become_configs(sample: str) -> None:
    recipe = load_recipe(sample)
    assert recipe.name == "sample"
    assert recipe.model.architecture == "deepseek_v3"
    assert recipe.model.config == {"hidden_size": 64, "num_hidden_layers": 2}
    assert recipe.data.domains == ("code", "prose")
    assert recipe.data.sampling.lengths == "fixed"
    assert recipe.flex.limit_bytes(10**12, 10**12) == int(1.6 * 2**30)
    assert recipe.flex.strategies == ("recompute", "offload")
    assert recipe.enforce_limit is False
    assert recipe.report.to == ("wandb",)
    assert recipe.output_dir == Path("runs/sample")


def test_numbers_and_words_are_read_as_meant(sample: str) -> None:
    recipe = load_recipe(sample)
    assert recipe.training["learning_rate"] == 3e-4  # YAML 1.1 reads it as text
    assert recipe.training["save_strategy"] == "no"  # YAML 1.1 reads it as false


def test_overrides_are_yaml_values(sample: str) -> None:
    recipe = load_recipe(
        sample,
        [
            "model.config.hidden_size=128",
            "data.sampling.lengths=skewed",
            "flex.strategies=[recompute]",
            "flex.enforce_limit=true",
            "training.learning_rate=1e-2",
            "accelerate=gpu_1proc",
            "report.html=null",
        ],
    )
    assert recipe.model.config["hidden_size"] == 128
    assert recipe.model.config["num_hidden_layers"] == 2
    assert recipe.data.sampling.lengths == "skewed"
    assert recipe.flex.strategies == ("recompute",)
    assert recipe.enforce_limit is True
    assert recipe.training["learning_rate"] == 0.01
    assert recipe.accelerate == "gpu_1proc"
    assert recipe.report.html is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modell.config={}", "modell: unknown key; did you mean 'model'?"),
        ("model.archtecture=x", "model.archtecture: unknown key; did you mean 'architecture'?"),
        ("data.sampling.lenghts=skewed", "data.sampling.lenghts: unknown key; did you mean 'lengths'?"),
        ("data.sampling.lengths=skewd", "data.sampling.lengths: input should be 'fixed', 'uniform' or 'skewed'"),
        ("data.sequence_length='4'", "data.sequence_length: input should be a valid integer, found '4'"),
        ("data.sequence_length=4", "data: sequence_length=4 must be at least 8"),
        ("data.domains=[cod]", "unknown domain 'cod'"),
        ("data.domains=[]", "domains is empty"),
        ("data.files=[a.txt]", "exactly one source"),
        ("data.name=null", "exactly one source"),
        ("data=null", "data: missing"),
        ("data=5", "data: input should be a section with keys, found 5"),
        ("flex.memory_limt=1GiB", "flex.memory_limt: unknown key; did you mean 'memory_limit'?"),
        ("flex.memory_limit=1.4G", "flex: memory_limit: '1.4G' is not a size"),
        ("flex.strategies=[recompute, ofload]", "unknown strategy 'ofload' in strategies; did you mean 'offload'?"),
        ("flex.enforce_limit=1", "flex.enforce_limit: 1 must be true or false"),
        ("training.bf16='true'", "training.bf16: the text 'true' is not a boolean; write true unquoted"),
        ("accelerate={use_cpu: 'False'}", "accelerate.use_cpu: the text 'False' is not a boolean"),
        ("parallel.ep=0", "parallel: ep=0 must be at least 1"),
        ("parallel.fsdp=-8", "parallel: fsdp=-8 must be at least 1"),
        ("parallel.pipeline=1", "parallel.pipeline: unknown key"),
        ("model.name_or_path=org/model", "exactly one of name_or_path"),
        ("report.to=wandb", "report.to: input should be a list, found 'wandb'"),
        ("training.report_to=[tensorboard]", "training.report_to: also set as report.to"),
    ],
)
def test_mistakes_name_the_place_and_the_remedy(sample: str, override: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(sample, [override])
    assert message in str(caught.value)
    assert str(caught.value).startswith("sample.yaml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.max_steps", "not of the form section.key=value"),
        ("training..max_steps=1", "not of the form section.key=value"),
        ("flex.strategies=[recompute", "the value is not valid YAML"),
        ("data.name.x=1", "data.name is 'stdlib', which has no keys below it"),
    ],
)
def test_bad_overrides(sample: str, override: str, message: str) -> None:
    with pytest.raises(RecipeError, match="override") as caught:
        load_recipe(sample, [override])
    assert message in str(caught.value)


def test_enforcing_needs_a_limit(sample: str) -> None:
    with pytest.raises(RecipeError, match=r"needs a memory_limit other than 'auto'"):
        load_recipe(sample, ["flex.enforce_limit=true", "flex.memory_limit=auto"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "found nothing"),
        ("- a\n- b\n", "found list"),
        ("model: {a: 1\n", "not valid YAML"),
        ("data: {name: stdlib}\ndata: {name: stdlib}\n", "key 'data' appears twice (line 2, column 1)"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path))
    assert message in str(caught.value)


def test_binary_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="UTF-8"):
        load_recipe(str(path))


def test_missing_file_and_unknown_name() -> None:
    with pytest.raises(RecipeError, match="does not exist"):
        load_recipe("nowhere/demo.yaml")
    with pytest.raises(RecipeError, match="did you mean 'demo'"):
        load_recipe("demoo")


def test_a_section_without_keys_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "short.yaml"
    path.write_text("model: {architecture: mixtral}\ndata: {name: stdlib}\nflex:\n")
    assert load_recipe(str(path)).flex.memory_limit == "auto"


def test_reading_needs_no_torch(sample: str) -> None:
    code = (
        "import sys; from flex_trainer.launch.recipe import load_recipe; load_recipe(sys.argv[1]);"
        "print([name for name in ('torch', 'transformers', 'datasets', 'accelerate') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code, sample], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_parallel_sizes(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: {architecture: mixtral}\ndata: {name: stdlib}\nparallel: {fsdp: 4, ep: 2, replicate: 2}\n")
    section = load_recipe(str(path)).parallel
    assert (section.num_ranks, section.is_used, section.dispatch) == (8, True, "flex")
    assert not load_recipe(str(path), ["parallel={ep: 1}"]).parallel.is_used
    for override, message in (
        ("parallel.replicate=0", "parallel: replicate=0 must be at least 1"),
        ("parallel.dispatch=flx", "parallel.dispatch: "),
        ("parallel.hsdp=2", "parallel.hsdp: unknown key; "),
        ("parallel.mixed_precision=1", "parallel.mixed_precision: "),
    ):
        with pytest.raises(RecipeError, match=re.escape(message)):
            load_recipe(str(path), [override])


def test_what_a_command_line_says_to_mean_a_recipe(tmp_path: Path) -> None:
    assert load_recipe("demo", ["training.max_steps=3"]).arguments == ["demo", "training.max_steps=3"]
    path = tmp_path / "demo.yaml"
    path.write_text("model: {architecture: mixtral}\ndata: {name: stdlib}\n")
    assert load_recipe(str(path)).arguments == [str(path)]
