"""What this machine is, and what would go wrong on it: versions, device, memory limits, launch settings."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flex_trainer.launch.findings import Finding, environment_findings, file_findings, recipe_findings
from flex_trainer.launch.recipe import Recipe
from flex_trainer.memory.process import cgroup_limit_bytes
from flex_trainer.units import format_bytes

# The versions the test suite ran with.
TESTED_VERSIONS = {"torch": "2.13", "transformers": "5.24", "accelerate": "1.15"}
_OTHER_PACKAGES = ("flex-trainer", "datasets", "wandb", "tensorboard", "peft", "trl")


def diagnose(config: Path | None = None, recipe: Recipe | None = None) -> list[Finding]:
    """Everything there is to say.

    Args:
        config: an accelerate configuration to check instead of accelerate's default one.
        recipe: whose launch to check; then no other configuration is looked at unless `config` is given.

    Raises:
        RecipeError: `config`, or what the recipe names, does not exist or is not YAML.
    """
    findings = [*_versions(), *_device(), *_memory(), *environment_findings()]
    if recipe is None or config is not None:
        findings += file_findings(config)
    if recipe is not None:
        findings += recipe_findings(recipe)
    return findings


def _versions() -> Iterator[Finding]:
    yield Finding("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name, tested in TESTED_VERSIONS.items():
        installed = version(name)
        is_tested = installed.startswith(f"{tested}.")
        text = installed if is_tested else f"{installed} (tested with {tested})"
        yield Finding(name, text, "info" if is_tested else "note")
    for name in _OTHER_PACKAGES:
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, "not installed")


def _device() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free_bytes, total_bytes = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            yield Finding(f"GPU {index}", f"{name}, {format_bytes(free_bytes)} free of {format_bytes(total_bytes)}")
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            yield Finding("bfloat16", "this GPU has no native bfloat16: bf16: true runs emulated and slow", "note")
        yield _allocator()
        return
    yield Finding("device", f"CPU, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        yield Finding(
            "device", "nvidia-smi is here but torch is a CPU build: install a CUDA build to use it", "problem"
        )


def _allocator() -> Finding:
    import torch

    from flex_trainer.memory.allocator import EXPANDABLE_SEGMENTS_ADVICE, has_expandable_segments

    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return Finding("allocator", f"{backend}, which keeps no statistics of fragmentation")
    if has_expandable_segments():
        return Finding("allocator", "expandable segments are on", "ok")
    advice = f"if memory is lost to fragmentation (lengths that vary), {EXPANDABLE_SEGMENTS_ADVICE}"
    return Finding("allocator", advice, "note")


def _memory() -> Iterator[Finding]:
    import psutil

    yield Finding("process", f"{format_bytes(psutil.Process().memory_info().rss)} resident now")
    machine = psutil.virtual_memory()
    yield Finding("machine", f"{format_bytes(machine.available)} available of {format_bytes(machine.total)}")
    limits = [machine.total]
    if sys.platform != "win32":
        import resource

        for name, limit in (("RLIMIT_DATA", resource.RLIMIT_DATA), ("RLIMIT_AS", resource.RLIMIT_AS)):
            soft = resource.getrlimit(limit)[0]
            unlimited = soft == resource.RLIM_INFINITY
            yield Finding(name, "unlimited" if unlimited else format_bytes(soft))
            if not unlimited:
                limits.append(soft)
    cgroup = cgroup_limit_bytes()
    yield Finding("cgroup", "no memory limit" if cgroup is None else format_bytes(cgroup))
    if cgroup is not None:
        limits.append(cgroup)
    if min(limits) < machine.total:
        yield Finding("memory", f"the lowest limit on a process here is {format_bytes(min(limits))}", "note")
