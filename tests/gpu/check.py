"""Proves the CUDA path on a machine with a GPU, and prints what it costs there. Needs torch, transformers, accelerate.

    PYTHONPATH=. python tests/gpu/check.py                          a few minutes, on the current GPU
    PYTHONPATH=. python tests/gpu/check.py --device cpu --quick     the script itself, on the CPU, in seconds

On the CPU a meter counts the engine's own bytes; what needs a device is skipped.

One line PASS, FAIL or SKIP per check on the error stream, then one JSON object on the output. Exit status 1 when a
check failed. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts: cuBLAS repeats its results bit by bit

import torch
from accelerate import Accelerator
from harness import (  # beside this file
    Run,
    Skipped,
    autocast,
    checkpointing,
    engine_step,
    make_run,
    managed,
    peak_of,
    predicted_peak_of,
    train,
)
from torch import nn

from flex_trainer import FlexConfig, FlexPlugin
from flex_trainer.activations.offload import OffloadStore, flat_bytes
from flex_trainer.activations.pinned_tier import PinnedTier
from flex_trainer.config import STRATEGIES
from flex_trainer.memory.offloading import OffloadService
from flex_trainer.strategy import Site, Strategy
from flex_trainer.testing.steps import instrumented, mixed

MIB = 2**20
CAP_SHARE = 0.6
"""Where limits lie between the peak of checkpointing (0) and of plain training (1)."""
PREDICTED_SHARE = 0.9
"""On the CPU: the limit, over what keeping everything is predicted to need."""
QUANTIZE_TOLERANCE = 0.05
"""Largest relative change of the gradients' norm that int8 may cause."""
LEAST_HIDDEN = 0.25
"""Share of the shorter of compute and copies that has to run at the same time as the other."""
MOST_EXTRA_WAITS = 4
"""Times per step that the host may wait for the device beyond what the plain step does: the padding mask is looked at
once, and the imbalance is read once."""


EXACT: tuple[tuple[str, Callable[[Site], Strategy], tuple[str, ...]], ...] = (
    ("keep", lambda site: Strategy.KEEP, ()),
    ("recompute", lambda site: Strategy.RECOMPUTE, ("recompute",)),
    ("offload", lambda site: Strategy.OFFLOAD, ("offload",)),
    ("mixed", mixed, ("recompute", "offload")),
)
"""Strategies that change no bit, and what they free."""


def check_equality(run: Run) -> None:
    """Loss and gradients as without the engine, under each strategy: bit by bit, if plain steps repeat so."""
    service = OffloadService(FlexConfig(strategies=("offload",)), run.device, 2**30)
    for name, dtype in (("fp32", None), ("bf16 autocast", torch.bfloat16)):
        plain = engine_step(run, None, dtype)
        noise = engine_step(run, None, dtype).difference(plain)
        run.figures[f"noise of plain, {name}"] = noise
        with instrumented(run.model):
            for kind, choose, frees in EXACT:
                step = engine_step(run, choose, dtype, service.store())
                difference = step.difference(plain)
                assert difference <= 4 * noise, f"{kind}, {name}: off by {difference}, plain by {noise}"
                for strategy in frees:
                    assert step.ledger.freed_bytes[strategy] > 0, f"{kind}, {name}: {strategy} freed nothing"
                assert step.ledger.held_bytes == step.ledger.recovered_bytes == 0, f"{kind}, {name}: bytes left behind"
            step = engine_step(run, lambda site: Strategy.QUANTIZE, dtype)
            change = abs(step.norm() / plain.norm() - 1)
            assert step.ledger.freed_bytes["quantize"] > 0 and change <= QUANTIZE_TOLERANCE, f"quantize: {change}"
            run.figures[f"change of the gradient norm by quantize, {name}"] = change
    assert service.is_available, "the tier failed"


def check_limit(run: Run) -> None:
    """Peak against a limit between checkpointing's peak and plain's, from the first step on; losses as plain."""
    if run.on_cuda:
        plain_bytes, checkpoint_bytes = peak_of(run), peak_of(run, checkpoints=True)
        limit_bytes = int(checkpoint_bytes + CAP_SHARE * (plain_bytes - checkpoint_bytes))
        run.figures |= {"plain_peak_mib": plain_bytes / MIB, "checkpoint_peak_mib": checkpoint_bytes / MIB}
    else:
        limit_bytes = int(PREDICTED_SHARE * predicted_peak_of(run))
    run.figures["limit_mib"] = limit_bytes / MIB
    with managed(run) as (accelerator, _):
        losses, _ = train(run, accelerator, 3, torch.bfloat16)
    run.clean()
    if run.on_cuda:
        torch.cuda.reset_peak_memory_stats(run.device)
    with managed(run, memory_limit=limit_bytes) as (accelerator, plugin):
        assert plugin is not None
        flex_losses, _ = train(run, accelerator, 4, torch.bfloat16)
        records = plugin.runtime.records
    peaks = [record.peak_bytes for record in records]
    peak_bytes = torch.cuda.max_memory_allocated(run.device) if run.on_cuda else max(peaks)
    run.figures["peak_mib_under_limit"] = peak_bytes / MIB
    planned = [record for record in records if not record.is_profile]
    run.figures["predicted_peak_over_measured"] = [r.predicted_peak_bytes / r.peak_bytes for r in planned]
    run.figures["predicted_bytes_over_held"] = [r.predicted_bytes / r.actual_bytes for r in planned]
    run.figures["freed_mib"] = {key: value / MIB for key, value in records[-1].freed_bytes.items()}
    assert peak_bytes <= limit_bytes, f"peak {peak_bytes / MIB:.0f} of {limit_bytes / MIB:.0f} MiB"
    assert sum(records[-1].freed_bytes.values()) > 0, "nothing was mitigated"
    if len(set(losses)) == 1:
        assert set(flex_losses) == set(losses), f"{flex_losses} instead of {losses}"


def check_cap(run: Run) -> None:
    """Under a real cap plain training dies, and FlexTrainer finishes, with memory_limit="auto"."""
    cap_bytes = int(run.figures["limit_mib"] * MIB)
    if not run.on_cuda:
        raise Skipped("a process this small is mostly libraries")
    total_bytes = torch.cuda.get_device_properties(run.device).total_memory

    @contextmanager
    def cap() -> Iterator[None]:
        torch.cuda.set_per_process_memory_fraction(cap_bytes / total_bytes, run.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, run.device)

    is_dead = False
    with cap():
        try:
            with managed(run) as (accelerator, _):
                train(run, accelerator, 1, torch.bfloat16)
        except torch.OutOfMemoryError:
            is_dead = True
    run.clean()
    assert is_dead, "plain training fits under the cap"
    with cap(), managed(run, memory_limit="auto") as (accelerator, plugin):
        assert plugin is not None and plugin.runtime.limit_bytes <= cap_bytes
        train(run, accelerator, 4, torch.bfloat16)
        run.figures["peak_mib_under_cap"] = max(record.peak_bytes for record in plugin.runtime.records) / MIB


def check_overlap(run: Run) -> None:
    """Offload-everything takes less than computing and copying one after the other."""
    if not run.on_cuda:
        raise Skipped("on a CPU, copies and compute share the cores")
    service = OffloadService(FlexConfig(strategies=("offload",)), run.device, 16 * 2**30)
    store, freed_bytes = service.store(), 0

    def median_of(step: Callable[[], object]) -> float:
        step()
        times = []
        for _ in range(3):
            run.synchronize()
            started = time.perf_counter()
            step()
            run.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times)

    plain_seconds = median_of(lambda: engine_step(run, None, torch.bfloat16, num_tokens=2048))

    def offload() -> None:
        nonlocal freed_bytes
        step = engine_step(run, lambda site: Strategy.OFFLOAD, torch.bfloat16, store, num_tokens=2048)
        freed_bytes = step.ledger.freed_bytes["offload"]

    with instrumented(run.model):
        offload_seconds = median_of(offload)
    size = 64 * MIB
    source = torch.ones(size, dtype=torch.uint8, device=run.device)

    def copy() -> None:
        place, down = store.tier.write(flat_bytes(source.untyped_storage(), run.device))
        down.release()
        up = store.tier.read(place, torch.empty_like(source))
        up.release()
        store.tier.free(place)

    copy_seconds = median_of(copy) * freed_bytes / size
    hidden = (plain_seconds + copy_seconds - offload_seconds) / min(plain_seconds, copy_seconds)
    run.figures["overlap"] = {
        "plain_step_s": plain_seconds,
        "copies_alone_s": copy_seconds,
        "offload_step_s": offload_seconds,
        "offloaded_mib": freed_bytes / MIB,
        "hidden_share": hidden,
    }
    assert hidden >= LEAST_HIDDEN, f"only {hidden:.2f} of copies or compute is hidden: {run.figures['overlap']}"


def check_pinned_bound(run: Run) -> None:
    """A pool that is too small is never passed; what does not fit is kept, and the gradients are right."""
    if not run.on_cuda:
        raise Skipped("a CPU device offloads to a file")
    plain = engine_step(run, None, torch.bfloat16)
    noise = engine_step(run, None, torch.bfloat16).difference(plain)
    bound_bytes = 64 * MIB
    before_bytes = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    tier = PinnedTier(run.device, bound_bytes)
    store = OffloadStore(tier, 16 * MIB)
    with warnings.catch_warnings(record=True) as caught, instrumented(run.model):
        warnings.simplefilter("always")
        step = engine_step(run, lambda site: Strategy.OFFLOAD, torch.bfloat16, store)
    assert any("pinned host memory" in str(warning.message) for warning in caught), (
        "no warning said which pool was full"
    )
    assert 0 < tier.pinned_bytes <= bound_bytes
    pinned_bytes = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before_bytes
    assert pinned_bytes <= bound_bytes + 2 * MIB, (
        f"{pinned_bytes / MIB:.0f} MiB pinned, {bound_bytes / MIB:.0f} allowed"
    )
    assert step.difference(plain) <= 4 * noise


def check_leak(run: Run) -> None:
    """After any number of steps the memory is what it was, without the cyclic collector."""
    with managed(run, memory_limit=int(run.figures["limit_mib"] * MIB)) as (accelerator, plugin):
        assert plugin is not None
        train(run, accelerator, 1, torch.bfloat16)  # what libraries keep for good is allocated by then
        run.clean()
        before_bytes = in_use(run, plugin)
        gc.disable()
        try:
            train(run, accelerator, 2 if run.is_quick else 5, torch.bfloat16)
            run.synchronize()
            left_bytes = in_use(run, plugin) - before_bytes
        finally:
            gc.enable()
    run.figures["left_bytes"] = left_bytes
    assert left_bytes == 0, f"{left_bytes} bytes more in use than before"


def in_use(run: Run, plugin: FlexPlugin) -> int:
    now = plugin.runtime.memory_now()
    return now["allocated"] if run.on_cuda else now["fake"]


def check_waits(run: Run) -> None:
    """How often the host waits for the device in a step, beyond the plain step."""
    if not run.on_cuda:
        raise Skipped("there is no device to wait for")

    def waits(accelerator: Accelerator) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with autocast(run, torch.bfloat16):
                    loss = run.model(**run.batch).loss
                accelerator.backward(loss)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        run.model.zero_grad(set_to_none=True)
        return [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]

    with managed(run) as (accelerator, _):
        plain = waits(accelerator)
    with managed(run, memory_limit=int(run.figures["limit_mib"] * MIB)) as (accelerator, _):
        train(run, accelerator, 2, torch.bfloat16)
        flex = waits(accelerator)
    run.figures["host_waits"] = {"plain": len(plain), "flex": len(flex), "where": sorted(set(flex) - set(plain))}
    assert len(flex) - len(plain) <= MOST_EXTRA_WAITS, f"waits at {run.figures['host_waits']}"


def bench(run: Run) -> None:
    """Step times of four sides in turns."""
    num_rounds, num_steps, num_warm_up = (1, 1, 1) if run.is_quick else (3, 3, 3)
    sides: dict[str, dict[str, Any]] = {
        "plain": {},
        "checkpointing": {},
        "flex_ample": {"memory_limit": 0.95},
        "flex_at_limit": {"memory_limit": int(run.figures["limit_mib"] * MIB)},
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(num_rounds):
        for name, settings in sides.items():
            with managed(run, **settings) as (accelerator, _), checkpointing(run, name == "checkpointing"):
                times = train(run, accelerator, num_warm_up + num_steps, torch.bfloat16)[1]
            seconds[name] += times[num_warm_up:]
            run.clean()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    run.figures["step_s"] = medians
    run.figures["step_over_plain"] = {name: value / medians["plain"] for name, value in medians.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu runs what does not need one", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == "cuda" else torch.device("cpu")
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    started = time.perf_counter()
    run = make_run(device, options.quick)
    torch.use_deterministic_algorithms(True, warn_only=True)
    run.check("equality", check_equality)
    if run.on_cuda:
        # Grouped products have a kernel for bfloat16 weights alone; for others the host waits for the row counts.
        nn.Module.to(run.model, torch.bfloat16)
    for name, function in (
        ("limit", check_limit),
        ("cap", check_cap),
        ("pinned_bound", check_pinned_bound),
        ("leak", check_leak),
    ):
        run.check(name, function)
    torch.use_deterministic_algorithms(False)  # times as users have them
    for name, function in (("overlap", check_overlap), ("waits", check_waits), ("bench", bench)):
        run.check(name, function)
    card = torch.cuda.get_device_properties(device) if run.on_cuda else None
    result = {
        "device": card.name if card is not None else "cpu",
        "device_mib": card.total_memory / MIB if card is not None else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "strategies": list(STRATEGIES),
        "seconds": time.perf_counter() - started,
        "checks": run.results,
        "figures": run.figures,
    }
    print(json.dumps(result))
    return int(any(text.startswith("FAIL") for text in run.results.values()))


if __name__ == "__main__":
    sys.exit(main())
