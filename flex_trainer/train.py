"""One training run from a recipe: `python -m flex_trainer.train RECIPE [section.key=value ...]`.

The same under `accelerate launch`, with as many processes as its configuration starts.
"""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, TrainingArguments, set_seed

from flex_trainer.config import FlexConfig
from flex_trainer.data.collate import CausalCollator
from flex_trainer.data.samples import TokenDataset
from flex_trainer.errors import UserError, user_mistakes_as_one_line
from flex_trainer.launch.accelerate import accelerate_settings, fsdp_on_cpu, launch_command
from flex_trainer.launch.build import (
    build_data,
    build_model,
    build_tokenizer,
    check_config,
    check_output_writable,
    check_recipe,
    model_config,
    training_arguments,
)
from flex_trainer.launch.distribute import check_ranks, is_launched_for_fsdp
from flex_trainer.launch.failing_rank import flush_at_failure, ranks_fail_together, tell_end, watch
from flex_trainer.launch.recipe import Recipe, load_recipe
from flex_trainer.launch.stopping import not_stopped_again, stop_as_exit_code, terminated_as_exception
from flex_trainer.launch.training_fields import check_trackers_installed
from flex_trainer.launch.yaml import RecipeError
from flex_trainer.memory.enforce import enforce_process_limit
from flex_trainer.memory.meter import limit_bytes, meter_for
from flex_trainer.ranks import launched_rank, num_launched
from flex_trainer.reports import RankSummary, gather_ranks, rank_table, summary_table
from flex_trainer.trainer import FlexTrainer
from flex_trainer.units import format_bytes

_WANDB_HOST = "api.wandb.ai"
_WANDB_HOMES = {
    "WANDB_DATA_DIR": Path("~/.local/share/wandb"),
    "WANDB_CACHE_DIR": Path("~/.cache/wandb"),
    "WANDB_CONFIG_DIR": Path("~/.config/wandb"),
}
"""What wandb keeps in the home directory, which a cluster may not let one write to."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the recipe named by the first argument, changed by the others; a user's mistake ends with exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with stop_as_exit_code(), user_mistakes_as_one_line(), ranks_fail_together():
        if not arguments or arguments[0].startswith("-"):
            raise UserError("usage: python -m flex_trainer.train RECIPE [section.key=value ...]")
        run(load_recipe(arguments[0], arguments[1:]))


def run(recipe: Recipe) -> FlexTrainer:
    """Train as `recipe` says; print a summary and write the report on the main process.

    Raises:
        RecipeError: something in the recipe that cannot be, an output directory or a report that cannot be written.
        ValueError: a limit that cannot be met, data that yields nothing.
        KeyboardInterrupt: training was stopped, by Ctrl-C or (Terminated) by SIGTERM; summary and report are there.
    """
    console = Console()
    # Step 1: check all that can be checked before anything is loaded.
    _take_one_gpu(recipe, console)
    check_recipe(recipe)
    _check_ranks(recipe)
    _note_processes(recipe, console)
    _hide_gpus(recipe)
    if launched_rank() == 0:
        check_output_writable(recipe)
    check_trackers_installed(recipe)
    if recipe.model.architecture is None:
        check_config(recipe, model_config(recipe))
    args = training_arguments(recipe)
    watch()
    _prepare_wandb(args, console)
    # Step 2: tokenizer, data, model.
    set_seed(args.seed)
    tokenizer = build_tokenizer(recipe)
    train_dataset, eval_dataset = build_data(recipe, args, tokenizer)
    model = build_model(recipe, tokenizer)
    # Step 3: train.
    if recipe.enforce_limit:
        _enforce_limit(recipe, args, console)
    trainer = _make_trainer(recipe.flex, args, tokenizer, model, train_dataset, eval_dataset)
    flush_at_failure(lambda exit_code: _flush_trackers(trainer, exit_code))
    try:
        with terminated_as_exception():
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    except KeyboardInterrupt:
        if trainer.is_world_process_zero():
            _report_so_far(recipe, trainer, console)
        raise
    tell_end()  # a rank that has more to train would not be in what comes next
    # Step 4: say what happened.
    ranks = gather_ranks(trainer.flex)
    if trainer.is_world_process_zero():
        _finish_wandb(trainer, console)
        _report(recipe, trainer, ranks, console)
    return trainer


def _make_trainer(
    flex: FlexConfig,
    args: TrainingArguments,
    tokenizer: Any,
    model: PreTrainedModel,
    train_dataset: TokenDataset,
    eval_dataset: TokenDataset | None,
) -> FlexTrainer:
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return FlexTrainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=CausalCollator(pad_token_id or 0),
        processing_class=tokenizer,
        flex=flex,
    )


def _take_one_gpu(recipe: Recipe, console: Console) -> None:
    """Show a process that was started alone one GPU: Trainer would spread its batches over all (nn.DataParallel).

    CUDA reads the variable when it is first used, which is after this; counting devices does not use it yet.
    """
    if "WORLD_SIZE" in os.environ or "CUDA_VISIBLE_DEVICES" in os.environ or recipe.training.get("use_cpu"):
        return
    num_gpus = torch.cuda.device_count()
    if num_gpus > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"
        console.print(
            f"One process uses one GPU: the first of {num_gpus}. For another, set CUDA_VISIBLE_DEVICES; for several, "
            "start with accelerate launch.",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def _check_ranks(recipe: Recipe) -> None:
    try:
        check_ranks(recipe)
    except UserError as error:
        raise RecipeError(f"{recipe.path.name}: {error}") from error


def _hide_gpus(recipe: Recipe) -> None:
    """Show a sharded run on the CPU no GPU: transformers would build its device mesh of GPUs wherever there are any.

    As in `_take_one_gpu`, CUDA has not been used yet.
    """
    if recipe.parallel.is_used and recipe.training.get("use_cpu"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _note_processes(recipe: Recipe, console: Console) -> None:
    """Say when the launch settings ask for more processes than there are (the run is the same, only narrower), and when
    they ask for sharding that there will not be."""
    if is_launched_for_fsdp() and recipe.training.get("use_cpu") and launched_rank() == 0:
        console.print(fsdp_on_cpu("The launch for FSDP"), style="yellow", highlight=False, soft_wrap=True)
    wanted = accelerate_settings(recipe).get("num_processes", 1)
    running = num_launched()
    if not recipe.parallel.is_used and wanted != running and launched_rank() == 0:
        console.print(
            f"The recipe's accelerate section is for {wanted} processes; this run has {running}. For {wanted}: "
            f"{launch_command(recipe)}",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def _prepare_wandb(args: TrainingArguments, console: Console) -> None:
    """Keep the W&B run beside the other output, and offline without a login."""
    if "wandb" not in (args.report_to or []) or args.process_index != 0:
        return
    output_dir = Path(args.output_dir or ".")
    if "WANDB_DIR" not in os.environ:
        output_dir.mkdir(parents=True, exist_ok=True)
        os.environ["WANDB_DIR"] = str(output_dir)
    for variable, below_home in _WANDB_HOMES.items():
        if variable not in os.environ and not _can_be_made(below_home):
            os.environ[variable] = str(output_dir / "wandb" / below_home.parent.name.lstrip("."))
    if "WANDB_MODE" not in os.environ and not _has_wandb_key():
        os.environ["WANDB_MODE"] = "offline"
        console.print(
            "Weights & Biases: no API key found, so the run is kept offline (wandb sync uploads it).", soft_wrap=True
        )


def _can_be_made(directory: Path) -> bool:
    try:
        expanded = directory.expanduser()
        expanded.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the second where there is no home at all
        return False
    return os.access(expanded, os.W_OK)


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    if not path.is_file():
        return False
    try:
        return netrc.netrc(path).authenticators(_WANDB_HOST) is not None
    except netrc.NetrcParseError:
        return False  # wandb cannot read a key from such a file either


def _flush_trackers(trainer: FlexTrainer, exit_code: int) -> None:
    """Have written what trackers hold back: this process is about to end without its own exit."""
    for callback in trainer.callback_handler.callbacks:
        writer: Any = getattr(callback, "tb_writer", None)
        if writer is not None:
            writer.flush()
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.finish(exit_code=exit_code)


def _enforce_limit(recipe: Recipe, args: TrainingArguments, console: Console) -> None:
    """Make the limit real: beyond it the system (CPU) or torch's allocator (CUDA) refuses memory.

    Raises:
        RecipeError: a limit below what the process uses already, or above what the system allows.
    """
    device = args.device
    enforced_bytes = limit_bytes(recipe.flex, meter_for(device))
    if device.type == "cuda":
        whole_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, enforced_bytes / whole_bytes), device)
    else:
        try:
            enforce_process_limit(enforced_bytes)
        except UserError as error:
            raise RecipeError(
                f"{recipe.path.name}: flex.memory_limit={recipe.flex.memory_limit} cannot be enforced "
                f"(flex.enforce_limit: true): {error}"
            ) from error
    if args.process_index == 0:
        console.print(
            f"Memory limit {format_bytes(enforced_bytes)}, enforced: an allocation beyond it fails.", highlight=False
        )


def _report_so_far(recipe: Recipe, trainer: FlexTrainer, console: Console) -> None:
    """Of a run that was stopped. What other ranks did is not known: they may not be able to answer any more."""
    state = trainer.state
    whose = " The summary is of rank 0 alone." if trainer.args.world_size > 1 else ""
    console.print(f"Stopped after {state.global_step} of {state.max_steps} steps.{whose}", highlight=False)
    with not_stopped_again():
        _report(recipe, trainer, [], console)
    _finish_wandb(trainer, console, exit_code=1)


def _finish_wandb(trainer: FlexTrainer, console: Console, exit_code: int = 0) -> None:
    if "wandb" in (trainer.args.report_to or []):
        import wandb

        if wandb.run is not None:
            run_dir = Path(wandb.run.dir).parent
            wandb.finish(exit_code=exit_code)
            console.print(f"W&B run: {run_dir}", highlight=False, soft_wrap=True)


def _report(recipe: Recipe, trainer: FlexTrainer, ranks: list[RankSummary], console: Console) -> None:
    if recipe.report.html is not None:
        path = trainer.flex.report(recipe.output_dir / recipe.report.html, ranks)
        console.print(f"Report: {path}", highlight=False, soft_wrap=True)
    console.print(summary_table(trainer.flex.records, trainer.flex.limit_bytes, trainer.flex.retries, ranks))
    if len(ranks) > 1:
        console.print(rank_table(ranks))


if __name__ == "__main__":
    main()
