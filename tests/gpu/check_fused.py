"""Proves fused accumulation on two GPUs over NCCL, and prints what it saves there.

    PYTHONPATH=. torchrun --nproc_per_node 2 tests/gpu/check_fused.py
    PYTHONPATH=. torchrun --nproc_per_node 2 tests/gpu/check_fused.py --device cpu --quick

The second line runs the script itself, on CPUs over gloo.

Losses, gradients and weights of steps with a backward beside each forward, against one after the other: bit for bit,
with deterministic algorithms. Then steps of both in turns. One line PASS or FAIL per check on the error stream, then
one JSON object on the output (rank 0). Exit status 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: cuBLAS repeats its results bit by bit

import torch
import torch.distributed as dist

from flex_trainer.bench.ep_model import SPEED, MeshSizes, write_model, write_weights
from flex_trainer.bench.fused_equality_rank import CHOICES, differences
from flex_trainer.bench.fused_ranks import measure_ways
from flex_trainer.testing.tiny import tiny_model

FAMILIES = ("deepseek_v3", "qwen3_moe", "mixtral")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="few cases of small models")
    options = parser.parse_args()
    if options.device == "cuda" and torch.cuda.device_count() < int(os.environ.get("WORLD_SIZE", "1")):
        print("SKIP: every rank needs a GPU of its own", file=sys.stderr)
        return 0
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    torch.use_deterministic_algorithms(True, warn_only=True)
    num_failed = _check_equality(options.quick)
    torch.use_deterministic_algorithms(False)
    figures = _measure(options.quick)
    if dist.get_rank() == 0:
        print(json.dumps({"num_failed": num_failed, **figures}))
    dist.destroy_process_group()
    return 1 if num_failed else 0


def _shared_directory() -> str:
    """One that all ranks of this machine see; rank 0 has made it."""
    made: list[Any] = [tempfile.mkdtemp(prefix="flex-gpu-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]


def _check_equality(is_quick: bool) -> int:
    directory = _shared_directory()
    mesh = list(MeshSizes(dist.get_world_size(), dist.get_world_size()))
    num_failed = 0
    for family in FAMILIES[: 1 if is_quick else None]:
        path = Path(directory) / family
        if dist.get_rank() == 0:
            write_weights(tiny_model(family), path)
        dist.barrier()
        cases: dict[str, dict[str, Any]] = {name: {"choices": name} for name in CHOICES}
        cases |= {"bfloat16": {"choices": "mixed", "has_autocast": True}, "planned": {"choices": None}}
        for name, case in list(cases.items())[: 2 if is_quick else None]:
            found = differences(path=str(path), mesh=mesh, num_steps=2, accumulation=3, **case)
            answers: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(answers, found)
            names = [one for answer in answers for one in answer["different"]]
            is_wrong = bool(names) or not found["num_pairs"]
            num_failed += is_wrong
            if dist.get_rank() == 0:
                told = f": {', '.join(names[:5])}" if names else ""
                print(f"{'FAIL' if is_wrong else 'PASS'} {family}, {name}{told}", file=sys.stderr)
    return num_failed


def _measure(is_quick: bool) -> dict[str, Any]:
    """Step times of each way, in turns."""
    sizes = {"num_hidden_layers": 2} if is_quick else {"hidden_size": 1024, "moe_intermediate_size": 512}
    batch_size, sequence_length = (2, 64) if is_quick else (4, 1024)
    shape = replace(SPEED, name="gpu", config={**SPEED.config, **sizes})
    directory = _shared_directory()
    if dist.get_rank() == 0:
        write_model(shape, directory)
    dist.barrier()
    ways = {name: {"fuse": fuse} for name, fuse in (("sequential", False), ("auto", "auto"), ("fused", True))}
    found = measure_ways(
        path=str(Path(directory) / shape.name),
        batch_size=batch_size,
        sequence_length=sequence_length,
        accumulation=8,
        memory_limit="2GiB" if is_quick else "auto",
        ways=ways,
        num_rounds=2 if is_quick else 9,
    )
    steps = {name: statistics.median(way["seconds"]) for name, way in found.items()}
    return {
        "step_s": steps,
        "fused_ratio": steps["fused"] / steps["sequential"],
        "auto_ratio": steps["auto"] / steps["sequential"],
        "auto_fuses": found["auto"]["num_pairs"] > 0,
    }


if __name__ == "__main__":
    sys.exit(main())
