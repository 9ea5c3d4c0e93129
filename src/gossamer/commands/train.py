"""`gossamer train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gossamer.commands.options import (
    JsonOption,
    OptionalRecipeArgument,
    OutOption,
    SetOption,
    print_json,
    print_note,
)
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from gossamer.config import Recipe
    from gossamer.report.run_folder import RunFolder

# What may change when a run is continued: nothing that its results depend on.
RESUMABLE_CHANGES = ("run.checkpoint_every", "run.threads")

ResumeOption = Annotated[
    Path | None,
    typer.Option("--resume", metavar="DIR", help="Go on with the stopped run in this folder."),
]


def train(
    recipe: OptionalRecipeArgument = None,
    *,
    changes: SetOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    json: JsonOption = False,
) -> None:
    """Train one recipe and leave everything in a run folder.

    Examples:

        gossamer train recipes/shakespeare.toml

        gossamer train my.toml --set train.workers=4 --set method.inner_steps=50 --out runs/small

        gossamer train --resume runs/small
    """
    from gossamer.commands.running import carry_out, check_simulated, stopping_on_signals
    from gossamer.config import load_recipe, prepare
    from gossamer.report.progress import Display
    from gossamer.report.run_folder import RunFolder
    from gossamer.report.tables import comparison_table, stdout_console

    checkpoint = None
    if resume is not None:
        if out is not None:
            raise ConfigError("--resume goes on in its own folder; leave out --out")
        folder = RunFolder(resume)
        check_simulated(folder.recipe(), f"gossamer launch --resume {resume}")
        prepared = prepare(resumed_recipe(folder, recipe, changes or []))
        checkpoint = folder.reopen()
    elif recipe is not None:
        loaded = load_recipe(recipe, changes or [])
        check_simulated(loaded, f"gossamer launch {recipe}")
        prepared = prepare(loaded)
        folder = RunFolder.create(out, prepared.recipe)
    else:
        raise ConfigError("give a RECIPE to train, or --resume DIR to go on with a stopped run")
    with Display(1) as display, stopping_on_signals() as stop:
        summary = carry_out(
            prepared,
            folder,
            label=prepared.recipe.method.name,
            display=display,
            stop=stop,
            resume=checkpoint,
        )
    if json:
        print_json(summary)
    else:
        stdout_console().print(comparison_table([summary]))
    print_note(f"files: {folder.path}; next: gossamer report {folder.path}")


def resumed_recipe(
    folder: RunFolder,
    recipe: Path | None,
    changes: list[str],
    *,
    may_change: Sequence[str] = RESUMABLE_CHANGES,
) -> Recipe:
    """The recipe of a run that is to go on. Raises `ConfigError` where it would be another run."""
    from gossamer.config import (
        apply_overrides,
        build_recipe,
        first_difference,
        load_recipe,
        recipe_tables,
    )

    kept = folder.recipe()
    if folder.is_finished:
        raise ConfigError(f"the run in {str(folder.path)!r} has finished; nothing is left to do")
    if recipe is not None:
        asked = load_recipe(recipe, changes)
    else:
        tables = apply_overrides(recipe_tables(kept), changes)
        asked = build_recipe(tables, base=folder.path)
    difference = first_difference(kept, asked, ignore=may_change)
    if difference is not None:
        raise ConfigError(
            f"cannot resume {str(folder.path)!r} with another configuration: {difference}; only "
            f"{', '.join(may_change[:-1])} and {may_change[-1]} may change"
        )
    return asked
