"""An estimate as tables for the terminal (`flex-trainer plan`, `flex-trainer profile`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text

from flex_trainer.units import format_bytes

_WAY_TITLES = {
    "plan": "chosen plan",
    "keep_all": "keep everything",
    "full_checkpointing": "full checkpointing",
    "offload_everything": "offload everything",
}
_PARTS = (
    ("parameters", "parameters_bytes"),
    ("gradients", "gradients_bytes"),
    ("optimizer", "optimizer_bytes"),
    ("gathered", "gathered_bytes"),
    ("activations", "activations_bytes"),
    ("transients", "transients_bytes"),
)
_MOST_KINDS = 12


def plan_tables(result: dict[str, Any]) -> Iterator[Table | Text]:
    """All of an estimate, in the order in which a person wants to read it."""
    yield _heading(result)
    yield _memory(result)
    yield _ways(result)
    if len(result["imbalances"][0]["plan"]["stages"]) > 1:
        yield _stages(result)
    yield _kinds(result)
    yield _verdict(result)
    yield _meaning(result)


def _table(title: str, names: Iterable[str], numbers: Iterable[str], *, is_wide: bool = False) -> Table:
    """A table that breaks what is too long for the terminal, and leaves nothing out.

    Args:
        names: of columns of text.
        numbers: of columns of numbers, which follow.
        is_wide: without lines between columns, which take two more places each.
    """
    columns = [Column(name, overflow="fold") for name in names]
    columns += [Column(name, overflow="fold", justify="right") for name in numbers]
    table = Table(*columns, title=title, title_justify="left")
    if is_wide:
        table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
    return table


def _heading(result: dict[str, Any]) -> Text:
    model, hardware, mesh, settings = (result[name] for name in ("model", "hardware", "mesh", "settings"))
    axes = ", ".join(f"{name} {mesh[name]}" for name in ("pp", "dp_replicate", "fsdp", "ep", "efsdp"))
    reserve = format_bytes(settings["reserve_bytes"])
    return Text(
        f"{result['recipe']}: {model['name']}, {model['num_parameters'] / 1e9:.2f} billion parameters in "
        f"{model['weights_dtype']}, {model['num_layers']} layers, {model['num_experts']} experts\n"
        f"{mesh['ranks']} rank{'s' if mesh['ranks'] > 1 else ''} ({axes}) of {hardware['title']}\n"
        f"micro-batch {settings['per_device_train_batch_size']} x {settings['sequence_length']} tokens per rank, "
        f"{settings['gradient_accumulation_steps']} of them per step, {settings['optim']}\n"
        f"limit {format_bytes(settings['memory_limit_bytes'])} per rank, of which {reserve} are kept free"
    )


def _memory(result: dict[str, Any]) -> Table:
    """What the fullest rank holds at its highest point, under the plan."""
    rows = _different(result)
    columns = [f"imbalance {_imbalance(row)}" for row in rows]
    table = _table("Memory of the fullest rank under the plan", [""], columns)
    worst = [row["plan"]["stages"][row["plan"]["worst_stage"]] for row in rows]
    for title, key in _PARTS:
        table.add_row(title, *(format_bytes(stage[key]) for stage in worst))
    if any(stage["buckets_bytes"] for stage in worst):
        table.add_row("gradient buckets", *(format_bytes(stage["buckets_bytes"]) for stage in worst))
    table.add_section()
    table.add_row("highest point", *(format_bytes(stage["peak_bytes"]) for stage in worst))
    table.add_row("optimizer step", *(format_bytes(stage["optimizer_step_bytes"]) for stage in worst))
    table.add_row("available", *(format_bytes(row["plan"]["available_bytes"]) for row in rows))
    table.add_row("fits", *(_yes(row["plan"]["fits"]) for row in rows))
    table.add_row("highest in", *(_where(stage) for stage in worst))
    table.add_row("strategies", *(_counts(stage["strategies"]) for stage in worst))
    return table


def _ways(result: dict[str, Any]) -> Table:
    numbers = ("memory", "fits", "step", "tokens/s", "to the\nplan")
    table = _table("The plan and other ways", ("imbalance", "way"), numbers)
    for row in _different(result):
        for way, title in _WAY_TITLES.items():
            found, plan = row[way], row["plan"]
            table.add_row(
                _imbalance(row) if way == "plan" else "",
                title,
                format_bytes(found["needed_bytes"]),
                _yes(found["fits"]),
                _seconds(found["step_seconds"]),
                f"{found['tokens_per_second']:,.0f}",
                f"{found['step_seconds'] / plan['step_seconds']:.3f}",
            )
        table.add_section()
    return table


def _stages(result: dict[str, Any]) -> Table:
    row = result["imbalances"][-1]
    numbers = (
        "in\nflight",
        "weights\nand state",
        "per micro-\nbatch",
        "highest\npoint",
        "forward",
        "backward",
        "added",
    )
    table = _table(f"Pipeline stages, plan at imbalance {_imbalance(row)}", ("stage", "layers"), numbers, is_wide=True)
    for stage in row["plan"]["stages"]:
        fixed = sum(stage[f"{name}_bytes"] for name in ("parameters", "gradients", "optimizer", "gathered"))
        table.add_row(
            str(stage["stage"]),
            f"{stage['first_layer']}-{stage['last_layer']}",
            str(stage["num_in_flight"]),
            format_bytes(fixed),
            format_bytes(stage["held_per_micro_batch_bytes"]),
            format_bytes(stage["peak_bytes"]),
            *(_seconds(stage[f"{name}_seconds"]) for name in ("forward", "backward", "added")),
        )
    return table


def _kinds(result: dict[str, Any]) -> Table:
    kinds = result["activations_by_kind"]
    total = sum(kinds.values()) or 1
    table = _table("Saved bytes of one balanced micro-batch, everything kept", ["operator"], ("bytes", "share"))
    for kind, num_bytes in list(kinds.items())[:_MOST_KINDS]:
        table.add_row(kind, format_bytes(num_bytes), f"{num_bytes / total:.1%}")
    rest = sum(list(kinds.values())[_MOST_KINDS:])
    if rest:
        table.add_row("others", format_bytes(rest), f"{rest / total:.1%}")
    table.add_section()
    table.add_row("sum", format_bytes(sum(kinds.values())), "")
    return table


def _verdict(result: dict[str, Any]) -> Text:
    most = max(row["applied_imbalance"] for row in result["imbalances"])
    bounded = any(row["imbalance"] > most for row in result["imbalances"])
    note = f" (No rank's experts can get more than {most:g} times the mean here.)" if bounded else ""
    if result["fits"]:
        return Text(f"It fits at every imbalance asked for.{note}", style="green")
    failing = ", ".join(_imbalance(row) for row in _different(result) if not row["plan"]["fits"])
    text = Text(f"It does not fit at imbalance {failing}.{note}", style="bold red")
    if not result["advice"]:
        return text.append("\nNo single change that was tried makes it fit; combine several, or use more ranks.")
    text.append("\nEach of these alone makes it fit (tried, not guessed):", style="not bold default")
    for found in result["advice"]:
        text.append(f"\n  {' '.join(found['overrides'])}\n      {found['text']}", style="not bold default")
    return text


def _meaning(result: dict[str, Any]) -> Table:
    table = Table(title="What the numbers mean", title_justify="left", show_header=False, box=None)
    for name, line in result["meaning"].items():
        table.add_row(name, Text(line, overflow="fold"))
    return table


def machine_tables(measured: dict[str, Any]) -> Iterator[Table]:
    """What `flex-trainer profile` measured."""
    hardware = measured["hardware"]
    table = _table(f"This machine: {hardware['title']}", ["measured"], ("size", "time", "rate"))
    for found in measured["measurements"]:
        if "flops_per_second" in found:
            rate, size = f"{found['flops_per_second'] / 1e9:,.1f} GFLOP/s", str(found["size"])
            table.add_row(f"{found['what']} {found['dtype']}", size, _seconds(found["seconds"]), rate)
        else:
            rate = f"{format_bytes(found['bytes_per_second'])}/s"
            table.add_row(found["what"], format_bytes(found["num_bytes"]), _seconds(found["seconds"]), rate)
    yield table
    columns = ("overhead", "bandwidth B", "knee S")
    knees = _table("Mitigation bandwidth (down and up again)", ["strategy"], columns)
    for name, knee in measured["knees"].items():
        knees.add_row(
            name,
            _seconds(knee["overhead_seconds"]),
            f"{format_bytes(knee['bytes_per_second'])}/s",
            format_bytes(knee["knee_bytes"]),
        )
    yield knees


def _different(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The imbalances without those that come to the same, since no rank can be that busy."""
    return list({row["applied_imbalance"]: row for row in reversed(result["imbalances"])}.values())[::-1]


def _imbalance(row: dict[str, Any]) -> str:
    return f"{row['applied_imbalance']:g}"


def _where(stage: dict[str, Any]) -> str:
    at = stage["peak_at"]
    return f"stage {stage['stage']}, {at['phase']},\n{at['num_in_flight']} in flight,\n{at['operator']}"


def _counts(strategies: dict[str, int]) -> str:
    return "\n".join(f"{count} {name}" for name, count in strategies.items()) or "keep all"


def _yes(is_so: bool) -> Text:
    return Text("yes", style="green") if is_so else Text("no", style="bold red")


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
