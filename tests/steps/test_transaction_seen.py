"""Steps that were run again: where they can be seen, and a run under a real limit that falls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

from flex_trainer import FlexConfig, FlexTrainer
from flex_trainer.reports import summary_table
from flex_trainer.testing.failures import TEXT
from flex_trainer.testing.processes import run_in_subprocess
from tests.once import Once
from tests.trainer_runs import LIMIT_BYTES, make

# Where it can be seen


def test_retries_are_in_the_log_the_summary_and_the_report(tmp_path: Path) -> None:
    class Failing(FlexTrainer):
        fail = Once()

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if self.state.global_step == 1:
                self.fail()
            return loss

    trainer = make(tmp_path, FlexConfig(LIMIT_BYTES), trainer_class=Failing, max_steps=3)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["flex/retries/count"] for row in rows] == [0, 1, 0]
    assert [row["flex/retries/total"] for row in rows] == [0, 1, 1]
    assert trainer.flex.summary().num_retries == 1
    table = summary_table(trainer.flex.records, trainer.flex.limit_bytes, trainer.flex.retries)
    assert table.row_count == 14
    page = trainer.flex.report(tmp_path / "report.html").read_text()
    assert "<h2>Steps retried</h2>" in page and "97.66 KiB" in page


# For real


@pytest.mark.sweep
def test_a_limit_that_falls_in_the_middle_of_a_run() -> None:
    result = run_in_subprocess("tests.steps.transaction_jobs:train_under_a_falling_limit", timeout_s=300)
    assert result.exit_code == 0, result.stderr[-3000:]
    assert result.value["num_retries"] >= 1 and result.value["is_equal"]
    assert result.value["operators"] and all(result.value["operators"])
    assert result.value["num_records"] == 4


def test_trainer_without_strategies_is_not_kept_from_failing(tmp_path: Path) -> None:
    class Failing(FlexTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(TEXT)

    trainer: Trainer = make(tmp_path, FlexConfig(10**9, strategies=()), trainer_class=Failing)
    with pytest.raises(RuntimeError, match="tried to allocate"):
        trainer.train()
