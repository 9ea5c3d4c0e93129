"""`gossamer launch`: a whole cluster run by one command."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gossamer.commands.options import (
    JsonOption,
    OptionalRecipeArgument,
    OutOption,
    SetOption,
    print_json,
    print_note,
)
from gossamer.commands.processes import require_cluster_extra
from gossamer.errors import ConfigError, GossamerError, Interrupted
from gossamer.worlds import refuse_unmeasurable

if TYPE_CHECKING:
    from gossamer.cluster.launch import Starter
    from gossamer.commands.launching import Plan
    from gossamer.config import Recipe

# What may change when a run is continued; the workers' number, as newcomers take a donor's state.
RESUMABLE_CHANGES = ("train.workers", "run.threads", "run.world", "measure.*", "cluster.*")


def launch(
    recipe: OptionalRecipeArgument = None,
    *,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="How many; default: the recipe's train.workers.")
    ] = None,
    out: OutOption = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="DIR", help="Go on with the stopped run in this folder."),
    ] = None,
    on: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Where the workers run: on this machine, or placed by Ray."),
    ] = "local",
    changes: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Start a coordinator and all workers, follow them, and keep them alive to the end.

    A worker that dies is started again and takes the state of another. Ctrl-C stops all of it
    within seconds; `--resume` goes on from the newest checkpoints, also with more or fewer workers.

    Examples:

        gossamer launch recipes/cluster.toml

        gossamer launch recipes/cluster.toml --workers 2 --set train.rounds=5 --out runs/real

        gossamer launch --resume runs/real
    """
    require_cluster_extra()
    from gossamer.report.tables import comparison_table, stdout_console

    if workers is not None:
        changes = [*(changes or []), f"train.workers={workers}"]
    if resume is not None:
        if out is not None:
            raise ConfigError("--resume goes on in its own folder; leave out --out")
        plan = _resumed(resume, recipe, changes or [])
    elif recipe is not None:
        plan = _new(recipe, changes or [], out)
    else:
        raise ConfigError("give a RECIPE to launch, or --resume DIR to go on with a stopped run")
    summary = _carry_out(plan, on)
    if json:
        print_json(summary)
    else:
        stdout_console().print(comparison_table([summary]))
    print_note(f"files: {plan.folder.path}; next: gossamer report {plan.folder.path}")


def _new(path: Path, changes: list[str], out: Path | None) -> Plan:
    from gossamer.commands.launching import Plan
    from gossamer.commands.processes import load_cluster_recipe
    from gossamer.deployment import job_of
    from gossamer.report.run_folder import RunFolder

    recipe = _with_threads(load_cluster_recipe(path, changes))
    refuse_unmeasurable(recipe)
    job = job_of(recipe)
    return Plan(recipe, job, RunFolder.create(out, recipe))


def _resumed(path: Path, recipe: Path | None, changes: list[str]) -> Plan:
    from gossamer.commands.launching import Plan, first_round
    from gossamer.commands.train import resumed_recipe
    from gossamer.config import prepare
    from gossamer.deployment import job_of
    from gossamer.report.run_folder import RunFolder

    folder = RunFolder(path)
    if folder.recipe().run.world != "cluster":
        raise ConfigError(f"{str(path)!r} is a simulated run: gossamer train --resume {path}")
    if folder.recipe().method.num_syncers:
        raise ConfigError(
            f"a stopped run of {folder.recipe().method.name}, which has a syncer, cannot be "
            f"resumed yet; start it again: gossamer launch {path / 'config.toml'}"
        )
    asked = _with_threads(
        resumed_recipe(
            folder, recipe, [*changes, "run.world=cluster"], may_change=RESUMABLE_CHANGES
        )
    )
    prepare(asked)
    refuse_unmeasurable(asked)
    job = job_of(asked)
    start = first_round(path, asked.train.workers)
    if start is None:
        raise ConfigError(
            f"the run in {str(path)!r} has no checkpoint to go on from; start it again in a new "
            f"folder: gossamer launch {path / 'config.toml'}"
        )
    _clear(path)
    run_id, rounds = start
    return Plan(asked, job, folder, run_id, folder.reopen_after(asked, rounds))


def _clear(path: Path) -> None:
    """Forget who took part when the run was stopped, and what finished workers have left."""
    for pattern in ("coordinator.sqlite*", "worker-*/final.safetensors", "worker-*/summary.json"):
        for file in path.glob(pattern):
            file.unlink()


def _with_threads(recipe: Recipe) -> Recipe:
    """Several processes share this machine: one thread each, unless the recipe says otherwise."""
    run = recipe.run.model_copy(update={"threads": recipe.run.threads or 1})
    return recipe.model_copy(update={"run": run})


def _carry_out(plan: Plan, on: str) -> dict[str, Any]:
    """Run it. An error leaves with notes: where the files are, and how to go on."""
    import torch

    from gossamer.commands.launching import Session, first_round
    from gossamer.report.cluster_view import ClusterView

    recipe, folder = plan.recipe, plan.folder
    torch.set_num_threads(recipe.run.threads or 1)
    plan.folder.record("start", {
        "method": recipe.method.name, "workers": recipe.train.workers, "seed": recipe.seed,
        "world": "cluster",
    })  # fmt: skip

    def make_starter(address: str) -> Starter:
        return starter_for(on, plan, address)

    title = f"{recipe.method.name}, {recipe.train.workers} workers"
    try:
        with ClusterView(title) as view:
            return asyncio.run(_run(Session, plan, view, make_starter))
    except Interrupted as error:
        if recipe.method.num_syncers:
            error.add_note(f"what the workers have saved is in {folder.path}")
        elif first_round(folder.path, recipe.train.workers) is None:
            error.add_note(f"no checkpoint was saved in {folder.path}")
        else:
            error.add_note(f"continue with: gossamer launch --resume {folder.path}")
        raise
    except ConfigError:
        if plan.run_id is None and not any(folder.path.glob("worker-*")):
            folder.discard()
        raise
    except GossamerError as error:
        error.add_note(f"files: {folder.path}")
        error.add_note(f"again from the newest checkpoints: gossamer launch --resume {folder.path}")
        raise
    finally:
        folder.close()


async def _run(session: Any, plan: Plan, view: Any, make_starter: Any) -> dict[str, Any]:
    """A session is made inside the loop that it lives in."""
    summary: dict[str, Any] = await session(plan, view, make_starter).run()
    return summary


def starter_for(on: str, plan: Plan, address: str) -> Starter:
    """How the workers are started. Raises `ConfigError` where an extra is missing."""
    from gossamer.cluster.launch import LocalStarter

    config, folder = plan.folder.path / "config.toml", plan.folder.path
    workers, threads = plan.recipe.train.workers, plan.recipe.run.threads or 1

    def arguments(worker: int) -> list[str]:
        index = worker - workers if worker >= workers else worker
        return [str(config), "--join", address, "--index", str(index), "--out", str(folder)]

    if on == "ray":
        from gossamer.cluster.on_ray import RayStarter

        if plan.recipe.method.num_syncers:
            raise ConfigError(
                f"{plan.recipe.method.name} has a syncer, which Ray does not place yet; start its "
                f"processes one by one (gossamer coordinator, worker and syncer)"
            )
        return RayStarter(address, folder=folder, threads=threads)
    return LocalStarter(arguments, folder=folder, threads=threads, num_workers=workers)
