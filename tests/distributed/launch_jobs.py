"""A run of a recipe in which one rank fails: `accelerate launch -m tests.distributed.launch_jobs HOW FILE RECIPE ...`.

Rank 1 fails in its second step. FILE then holds the time of that, as seconds since the epoch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from flex_trainer import train
from flex_trainer.activations.aside import is_recomputing
from flex_trainer.planner.plan import Uniform
from flex_trainer.strategy import Strategy
from flex_trainer.testing.forced import ForcedRuntime
from flex_trainer.trainer import FlexTrainer

FAILING_RANK = 1


class FailingTrainer(FlexTrainer):
    how = ""
    time_file = Path()

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.how.startswith("fused"):
            if self.state.global_step == 1 and self.args.process_index == FAILING_RANK and not self.time_file.exists():
                model: Any = self.model
                if self.how == "fused-recomputation":
                    self.arm_recomputations()
                else:
                    self.arm(model.model.layers[-1])
        elif self.state.global_step == 1:
            if self.args.process_index == FAILING_RANK:
                self.time_file.write_text(str(time.time()))
                self.fail()
            elif self.how == "raise-while-others-compute":
                time.sleep(120)
        return super().training_step(*args, **kwargs)

    def arm(self, layer: torch.nn.Module) -> None:
        """Have the layer fail in the second forward from now on, or in the first backward: both are of one pair."""
        num_forwards = 0

        def forward_hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            nonlocal num_forwards
            num_forwards += 1
            if num_forwards == 2 and self.how != "fused-backward":
                self.fail_now()
            if num_forwards == 1 and self.how == "fused-backward":
                output.register_hook(lambda gradient: self.fail_now())

        layer.register_forward_hook(forward_hook)

    def arm_recomputations(self) -> None:
        """Have everything recomputed, and the first linear layer that is fail, in the backward of a pair."""
        runtime: Any = self.flex
        runtime.__class__, runtime._choices = ForcedRuntime, Uniform(Strategy.RECOMPUTE)
        linear = torch.nn.functional.linear

        def fail_if_recomputed(*args: Any, **kwargs: Any) -> torch.Tensor:
            if is_recomputing():
                self.fail_now()
            return linear(*args, **kwargs)

        torch.nn.functional.linear = fail_if_recomputed

    def fail_now(self) -> None:
        self.time_file.write_text(str(time.time()))
        self.fail()

    def fail(self) -> None:
        if self.how in ("kill", "fused-kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "allocate":
            torch.ones(2 * self.flex.limit_bytes, dtype=torch.uint8)
        else:
            raise ValueError("rank 1 has had enough")


def main() -> None:
    how, time_file, *arguments = sys.argv[1:]
    FailingTrainer.how, FailingTrainer.time_file = how, Path(time_file)
    train.FlexTrainer = FailingTrainer  # type: ignore[misc]
    train.main(arguments)


if __name__ == "__main__":
    main()
