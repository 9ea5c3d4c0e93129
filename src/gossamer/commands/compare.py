"""`gossamer compare`, `gossamer plan time` and `gossamer demo`: one recipe, several methods."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.commands.options import (
    JsonOption,
    MethodOption,
    OptionalRecipeArgument,
    OutOption,
    RecipeArgument,
    SetOption,
    print_json,
    print_note,
)
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from gossamer.config import Prepared, Recipe
    from gossamer.report.comparison import Comparison, Entry

# Label, and how the method is written. The paper's subset (embedding, head, two layers) is 43 % of
# its 16 layers and nearly all of the demo's two; their first one is 43 % here, and the block that
# `gossamer sensitivity` ranks first.
DEMO_METHODS = {
    "data_parallel": "data_parallel",
    "diloco": "diloco",
    "GlobalM1": "GlobalM1",
    "GlobalM1LocalM2": "GlobalM1LocalM2",
    "GlobalM1LocalM2-subset": "GlobalM1LocalM2-subset:mix2_subset=layers.0",
}
PLANNED_METHODS = ("data_parallel", "local_sgd", "diloco", "GlobalM1", "GlobalM1LocalM2",
                   "GlobalM1LocalM2-subset", "LocalM1M2")  # fmt: skip

# There is nothing to save; and a plan is a simulation, whatever world the recipe is for.
UNTRAINED = ('run.numerics="none"', "run.checkpoint_every=0", "run.world=sim")

ResumeOption = Annotated[
    Path | None,
    typer.Option("--resume", metavar="DIR", help="Finish the stopped comparison in this folder."),
]


def compare(
    recipe: OptionalRecipeArgument = None,
    *,
    methods: MethodOption = None,
    changes: SetOption = None,
    out: OutOption = None,
    resume: ResumeOption = None,
    json: JsonOption = False,
) -> None:
    """Run one recipe with several methods and tabulate them.

    What the methods have in common (inner steps, outer learning rate and momentum) comes from the
    recipe; its other hyperparameters do not carry over.

    Examples:

        gossamer compare r.toml --method diloco --method GlobalM1

        gossamer compare r.toml --method factored_gossip:mix2=pair,mix2_subset=embedding+head

        gossamer compare --resume runs/compare-1
    """
    from gossamer.config import load_recipe
    from gossamer.report.comparison import Comparison, entries_of

    if resume is not None:
        if recipe is not None or methods or changes or out is not None:
            raise ConfigError("--resume takes everything from its folder; give nothing else")
        comparison = Comparison.reopen(resume)
        run_comparison(comparison, prepare_all(comparison.recipe(), comparison.entries), json=json)
        return
    if recipe is None or not methods:
        raise ConfigError("give a RECIPE and at least one --method, or --resume DIR")
    base, entries = load_recipe(recipe, changes or []), entries_of(methods)
    prepared = prepare_all(base, entries)
    run_comparison(Comparison.create(out, base, entries), prepared, json=json)


def plan_time(
    recipe: RecipeArgument,
    *,
    methods: MethodOption = None,
    changes: SetOption = None,
    out: OutOption = None,
    json: JsonOption = False,
) -> None:
    """Time, bytes and utilisation of a recipe, without training.

    The methods really run, on tensors that have shapes and no content: `compare` with
    run.numerics = "none". Without --method: every one that can be planned.

    Examples:

        gossamer plan time recipes/shakespeare.toml

        gossamer plan time r.toml --set network.bandwidth=1Gbit/s --method diloco
    """
    from gossamer.config import load_recipe
    from gossamer.report.comparison import Comparison, entries_of

    base = load_recipe(recipe, [*(changes or []), *UNTRAINED])
    entries = entries_of(methods or PLANNED_METHODS)
    prepared = prepare_all(base, entries)
    run_comparison(Comparison.create(out, base, entries, stem="plan"), prepared, json=json)


def demo(out: OutOption = None, changes: SetOption = None, json: JsonOption = False) -> None:
    """Train on the shipped text with five methods, and compare them; a few minutes.

    Eight simulated workers train a small model for real, while time passes as it would for a model
    of 1.5 billion parameters over links of 100 Mbit/s.

    Examples:

        gossamer demo

        gossamer demo --set network.bandwidth=1Gbit/s --out runs/fast-links
    """
    from gossamer.config import load_recipe
    from gossamer.report.comparison import Comparison, Entry

    with resources.as_file(resources.files("gossamer") / "data" / "demo.toml") as path:
        base = load_recipe(path, changes or [])
    entries = [Entry(label, label, written) for label, written in DEMO_METHODS.items()]
    prepared = prepare_all(base, entries)
    comparison = Comparison.create(out, base, entries, stem="demo")
    run_comparison(comparison, prepared, json=json)
    print_note(
        "then: gossamer train recipes/shakespeare.toml, a longer run whose text reads like a play"
    )


def prepare_all(base: Recipe, entries: Sequence[Entry]) -> list[Prepared]:
    """Every variant, checked before the first of them starts."""
    from gossamer.commands.running import check_simulated
    from gossamer.config import prepare, variant

    check_simulated(base, "gossamer launch RECIPE for each method")
    prepared = []
    for entry in entries:
        try:
            prepared.append(prepare(variant(base, entry.written)))
        except ConfigError as error:
            raise ConfigError(f"{entry.label}: {error}") from None
    return prepared


def run_comparison(
    comparison: Comparison, prepared: Sequence[Prepared], *, json: bool
) -> dict[str, Any]:
    """Carry out what is not there yet, write `comparison.json`, print it. Returns its content."""
    from gossamer.commands.running import carry_out, stopping_on_signals
    from gossamer.report.progress import Display
    from gossamer.report.run_folder import RunFolder
    from gossamer.report.tables import comparison_table, stdout_console

    left = [
        (entry, plan)
        for entry, plan in zip(comparison.entries, prepared, strict=True)
        if not comparison.folder_of(entry).is_finished
    ]
    with Display(len(left)) as display, stopping_on_signals() as stop:
        for entry, plan in left:
            folder, checkpoint = comparison.folder_of(entry), None
            if folder.latest_checkpoint() is not None:
                checkpoint = folder.reopen()
            else:
                shutil.rmtree(folder.path, ignore_errors=True)  # of a run killed before it saved
                folder = RunFolder.create(folder.path, plan.recipe)
            try:
                carry_out(
                    plan,
                    folder,
                    label=entry.label,
                    display=display,
                    stop=stop,
                    resume=checkpoint,
                    resume_command=f"gossamer compare --resume {comparison.path}",
                )
            except ConfigError:
                comparison.discard()
                raise
    content = comparison.write()
    if json:
        print_json(content)
    else:
        stdout_console().print(comparison_table(content["rows"]))
    print_note(f"files: {comparison.path}; next: gossamer report {comparison.path}")
    return content
