"""`gossamer sample` and `gossamer sensitivity`: looking into what was trained."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.commands.options import JsonOption, SetOption, print_json, print_note
from gossamer.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from gossamer.config import Prepared
    from gossamer.measure.sensitivity import SensitivityResult

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")]
SourceArgument = Annotated[
    Path, typer.Argument(metavar="RECIPE|RUN", help="A recipe to train, or a finished run.")
]


def sample(
    run: RunArgument,
    *,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "\n",
    length: Annotated[int, typer.Option(help="Bytes to write.")] = 600,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Fixes what is drawn.")] = 0,
    json: JsonOption = False,
) -> None:
    """Write text with the averaged model of a run.

    Examples:

        gossamer sample runs/diloco-1

        gossamer sample runs/demo-1/diloco --prompt "KING HENRY. " --length 300 --temperature 0.6
    """
    from gossamer.report.run_folder import RunFolder, read_json_object
    from gossamer.training.generate import stream
    from gossamer.training.llama import SHAPES, Llama

    folder = RunFolder(run)
    weights = folder.averaged_model()
    about = read_json_object(folder.path / "model.json")
    if about["task"] != "text":
        raise ConfigError(f"{str(run)!r} holds a model for {about['task']}; only text is sampled")
    model = Llama(SHAPES[about["model"]])
    missing = {name for name, _ in model.named_parameters()} - set(weights)
    if missing:
        raise CheckpointError(f"{str(run)!r}: model.safetensors lacks {sorted(missing)[0]!r}")
    model.load_state_dict(weights, strict=False)  # a tied weight is stored once
    model.eval()
    window = min(int(about["sequence_length"]), model.shape.max_length)
    pieces = stream(model, prompt, length=length, temperature=temperature, seed=seed, window=window)
    if json:
        print_json({"prompt": prompt, "text": "".join(pieces), "seed": seed})
        return
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def sensitivity(
    source: SourceArgument,
    *,
    share: Annotated[float, typer.Option(help="Of the parameters, for the proposal.")] = 0.43,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds to train a RECIPE for; default: the recipe's.")
    ] = None,
    changes: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the proposal there, as TOML."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Find which blocks of the model drive the workers' disagreement.

    For every block: how far the mean JS distance of the workers' predictions drops when only that
    block is averaged. Proposes the blocks to mix for a share of the parameters.

    Examples:

        gossamer sensitivity runs/GlobalM1-1

        gossamer sensitivity my.toml --rounds 3 --share 0.3 --out subset.toml
    """
    from gossamer.measure.sensitivity import propose_subset, recipe_fragment
    from gossamer.report.files import write_atomically

    if not 0 < share <= 1:
        raise ConfigError(f"--share must be above 0 and at most 1; got {share}")
    if out is not None and out.exists():
        raise ConfigError(f"--out {str(out)!r} exists and is not overwritten")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(
            f"--out {str(out)!r}: there is no folder {str(out.parent)!r}; make it first"
        )
    if source.is_dir():
        if rounds is not None or changes:
            raise ConfigError("--rounds and --set are for a RECIPE; this run is trained already")
        trained = _of_run(source)
    else:
        trained = _trained_briefly(source, rounds, changes or [])
    result = _rank(trained)
    chosen = propose_subset(result, share)
    fragment = recipe_fragment(chosen)
    if out is not None:
        write_atomically(out, fragment)
    if json:
        names = [block.name for block in chosen]
        proposal = {"share": share, "blocks": names, "recipe": fragment}
        print_json({"schema_version": 1, **result.to_dict(), "proposal": proposal})
    else:
        _print_ranking(result, fragment)
    if out is not None:
        print_note(f"written to {out}; copy it into the [method] of a recipe")


@dataclass(frozen=True, slots=True)
class _Trained:
    """A trained recipe: the workers' parameters [M, P], and the averaged model's state dict."""

    prepared: Prepared
    parameters: Tensor
    averaged: dict[str, Tensor]


def _of_run(path: Path) -> _Trained:
    from gossamer.config import prepare
    from gossamer.report.run_folder import RunFolder

    folder = RunFolder(path)
    prepared = prepare(folder.recipe())
    return _Trained(prepared, folder.worker_parameters(), folder.averaged_model())


def _trained_briefly(path: Path, rounds: int | None, changes: list[str]) -> _Trained:
    from gossamer.commands.running import check_simulated, simulate_prepared, stopping_on_signals
    from gossamer.config import load_recipe, prepare
    from gossamer.report.progress import Display

    if rounds is not None:
        changes = [*changes, f"train.rounds={rounds}"]
    recipe = load_recipe(path, changes)
    check_simulated(recipe, "gossamer launch, and then the folder of the run")
    prepared = prepare(recipe)
    if prepared.recipe.run.numerics == "none":
        raise ConfigError('sensitivity measures predictions: run.numerics must be "real"')
    with Display(1) as display, stopping_on_signals() as stop:
        progress = display.run(prepared.recipe.method.name)
        result = simulate_prepared(prepared, listener=progress, stop=stop)
        display.finish(progress)
    return _Trained(prepared, result.parameters, result.averaged)


def _rank(trained: _Trained) -> SensitivityResult:
    from gossamer.measure.blocks import blocks_of
    from gossamer.measure.sensitivity import rank_blocks

    layout = trained.prepared.layout
    return rank_blocks(trained.parameters, layout, _predictor(trained), blocks_of(layout))


def _predictor(trained: _Trained) -> Callable[[Tensor], Tensor]:
    """Logits on the task's probe batch for a flat vector [P], with the averaged model's buffers."""
    from gossamer.training.task import Predicts

    task = trained.prepared.task
    if not isinstance(task, Predicts):
        raise ConfigError("sensitivity needs a task with predictions and a probe batch")
    model = task.build().eval()
    model.load_state_dict(trained.averaged, strict=False)  # a tied weight is stored once
    batch = task.probe_batch()

    def predict(flat: Tensor) -> Tensor:
        views = trained.prepared.layout.views(flat)
        model.load_state_dict(views, strict=False)  # buffers stay
        return task.predict(model, batch)

    return predict


def _print_ranking(result: SensitivityResult, fragment: str) -> None:
    from rich.table import Table

    from gossamer.report.tables import stdout_console

    table = Table(title=f"mean pairwise JS distance {result.baseline_js:.4f}")
    for heading in ("block", "parameters", "share", "JS if averaged", "drop", "drop per million"):
        table.add_column(heading, justify="left" if heading == "block" else "right")
    for row in result.by_drop():
        cells: list[Any] = [row.block.name, f"{row.block.numel:,}", f"{row.block.share:.1%}"]
        cells += [f"{row.js_block_averaged:.4f}", f"{row.drop:+.4f}"]
        table.add_row(*cells, f"{row.drop_per_parameter * 1e6:+.4f}")
    console = stdout_console()
    console.print(table)
    console.print(fragment)
