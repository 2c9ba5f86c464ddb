"""`flex-trainer plan`: tables for readers, JSON for tools, one line for mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from flex_trainer.cli import main
from flex_trainer.cost.hardware import HARDWARE
from tests.estimate.recipes import write_recipe


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    return int(exit_.value.code or 0)


def test_a_plan_on_the_terminal_and_in_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, plot = tmp_path / "plan.json", tmp_path / "plan.svg"
    overrides = ["parallel={fsdp: 4, ep: 4, pp: 1}", "training.gradient_accumulation_steps=2"]
    arguments = ["--hardware", "a100", "--ranks", "8", "--json", str(path), "--plot", str(plot)]
    assert run(write_recipe(tmp_path), *overrides, *arguments) == 0
    output = capsys.readouterr().out
    assert "8 ranks" in output and "A100" in output and "What the numbers mean" in output
    assert_whole(output)
    result = json.loads(path.read_text())
    assert result["mesh"] == {"ranks": 8, "pp": 1, "dp_replicate": 2, "fsdp": 4, "ep": 4, "efsdp": 1}
    assert [row["imbalance"] for row in result["imbalances"]] == [1.0, 1.2, 2.6]
    for row in result["imbalances"]:
        for way in ("plan", "keep_all", "full_checkpointing", "offload_everything"):
            found = row[way]
            assert found["step_seconds"] > 0
            stage = found["stages"][found["worst_stage"]]
            assert stage["peak_bytes"] == stage["base_bytes"] + stage["activations_bytes"] + stage["transients_bytes"]
            assert found["needed_bytes"] == max(stage["peak_bytes"], stage["optimizer_step_bytes"])
            assert found["fits"] is (found["needed_bytes"] <= found["available_bytes"])
    assert result["fits"] and result["advice"] == []
    assert set(result["activations_by_kind"]) >= {"norm", "linear", "expert_up", "attention_core"}
    assert set(result["meaning"]) >= {"parameters", "activations", "transients", "step"}
    assert plot.read_text().startswith("<?xml")


def assert_whole(output: str) -> None:
    """Nothing is left out of a terminal of 80 columns, and no word of a heading is broken."""
    assert "…" not in output
    for words in ("full checkpointing", "highest point", "weights and state", "forward", "backward"):
        assert all(word in output for word in words.split())


def test_stages_and_long_names_fit_a_narrow_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["parallel={fsdp: 2, ep: 2, pp: 2}", "training.gradient_accumulation_steps=4"]
    assert run(write_recipe(tmp_path), *overrides, "--hardware", "h100", "--imbalance", "1.0") == 0
    output = capsys.readouterr().out
    assert "Pipeline stages" in output and max(map(len, output.splitlines())) <= 80
    assert_whole(output)


def test_which_device_was_assumed_is_said(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there, arguments, is_said in ((False, [], True), (False, ["--hardware", "h100"], False), (True, [], False)):
        monkeypatch.setattr(
            "flex_trainer.estimate.machine.gpu_here", lambda there=is_there: HARDWARE["a100"] if there else None
        )
        assert run(write_recipe(tmp_path), "--imbalance", "1.0", *arguments) == 0
        output = " ".join(capsys.readouterr().out.split())
        told = (
            "Planned for NVIDIA H100 SXM 80 GB, since none of the known GPUs was found here. For this machine: flex-t"
        )
        assert (told in output) is is_said


def test_without_matplotlib_nothing_is_planned_for_a_plot(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.modules["flex_trainer.cli.plan"], "find_spec", lambda name: None)
    assert run(write_recipe(tmp_path), "--plot", str(tmp_path / "plan.svg")) == 2
    assert "pip install matplotlib, or the extra 'plot'" in capsys.readouterr().err


def test_what_does_not_fit_gets_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    arguments = ["flex.memory_limit=4MiB", "--hardware", "h100", "--imbalance", "1.0", "--json", str(path)]
    assert run(write_recipe(tmp_path), *arguments) == 0
    output = capsys.readouterr().out
    assert "It does not fit" in output and "flex.memory_limit=" in output
    result = json.loads(path.read_text())
    assert not result["fits"]
    (limit,) = [found for found in result["advice"] if found["overrides"][0].startswith("flex.memory_limit=")]
    assert run(write_recipe(tmp_path), limit["overrides"][0], *arguments[1:]) == 0
    assert json.loads(path.read_text())["fits"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "h10"], "--hardware 'h10' is not known; did you mean 'h100'?"),
        (["--hardware", "machine"], "run flex-trainer profile first"),
        (["--imbalance", "1,x"], "--imbalance '1,x' must be numbers"),
        (["--imbalance", "0.5"], "--imbalance 0.5 must be at least 1"),
        (["--plot", "plan.gif"], "must end in .svg or .png"),
        (["--ranks", "0"], "--ranks 0 must be at least 1"),
        (["parallel.ep=2"], "ep=2 does not divide fsdp=1"),
        (["parallel.fsdp=4", "--ranks", "6"], "does not divide the 6 there are"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, tmp_path: Path, capsys) -> None:
    assert run(write_recipe(tmp_path), *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_without_a_network_the_configuration_is_missing(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipe = write_recipe(tmp_path)
    overrides = ["model={name_or_path: nobody/no-such-model}"]
    assert run(recipe, *overrides) == 2
    error = capsys.readouterr().err
    assert "'nobody/no-such-model' cannot be loaded" in error
    assert "give a directory with its config.json" in error
