"""`gossamer plan goodput`: how much of their time failing chips leave for training."""

from __future__ import annotations

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.commands.options import JsonOption, print_json, print_note
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from gossamer.sim.goodput import Cell, Measured

_JOBS_MAX = 64


def plan_goodput(
    *,
    chips: Annotated[
        list[str] | None,
        typer.Option(
            "--chips", metavar="NUMBER", help="Chips of the run, such as 1.2M. Repeatable."
        ),
    ] = None,
    learners: Annotated[
        list[int] | None,
        typer.Option("--learners", min=2, help="Learners that share the chips. Repeatable."),
    ] = None,
    step_time: Annotated[str, typer.Option(help="Time of one inner step.")] = "10s",
    learner_steps: Annotated[
        int, typer.Option(min=24, help="Steps to run in each Decoupled cell, over all learners.")
    ] = 8000,
    seed: Annotated[int, typer.Option(min=0, help="Fixes every failure.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, max=_JOBS_MAX, help="Processes to use.")] = 2,
    json: JsonOption = False,
) -> None:
    """Goodput of data parallel and Decoupled DiLoCo where chips fail once a year each.

    Without options: the 30 cells of the paper's table, with its figures beside them; one or two
    minutes. The times that a failure costs are fitted to that table. Decoupled rows run the real
    learner and syncer loops on tensors without content.

    Examples:

        gossamer plan goodput

        gossamer plan goodput --chips 1.2M --learners 8
    """
    from gossamer.sim.goodput import CHIPS, LEARNERS, Cell, measure

    columns = [_count(text) for text in chips] if chips else list(CHIPS)
    rows = [0, 1, *(learners or LEARNERS)]
    cells = [
        Cell(number, row, _seconds(step_time), learner_steps, seed)
        for row in dict.fromkeys(rows)
        for number in dict.fromkeys(columns)
    ]
    # The longest first, so that no process is left with one at the end.
    order = sorted(range(len(cells)), key=lambda i: (-cells[i].learners, -cells[i].chips))
    context = multiprocessing.get_context("spawn")
    if jobs == 1 or len(cells) < 2 * jobs:
        measured = [measure(cell) for cell in cells]
    else:
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            done = dict(zip(order, pool.map(measure, [cells[i] for i in order]), strict=True))
        measured = [done[i] for i in range(len(cells))]
    content = _content(cells, measured)
    if json:
        print_json(content)
        return
    from gossamer.report.tables import stdout_console

    stdout_console().print(_table(content["cells"]))
    errors = content["difference_rms"], content["difference_largest"]
    if errors[0] is not None:
        print_note(f"against the paper: rms {errors[0]:.1f} points, at most {errors[1]:.1f}")
    print_note("failure times are fitted to the paper's table: 25.5 s a failure (86 s a restart)")


def _count(text: str) -> float:
    from gossamer.units import parse_count

    return _parsed("--chips", parse_count, text)


def _seconds(text: str) -> float:
    from gossamer.units import parse_duration

    return _parsed("--step-time", parse_duration, text)


def _parsed(option: str, parse: Any, text: str) -> float:
    try:
        value = float(parse(text))
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not 0 < value < math.inf:
        raise ConfigError(f"{option}: a number above 0 expected; got {text!r}")
    return value


def _content(cells: list[Cell], measured: list[Measured]) -> dict[str, Any]:
    from gossamer.sim.goodput import published

    rows, differences = [], []
    for cell, found in zip(cells, measured, strict=True):
        reference = published(cell)
        percent = 100 * found.goodput
        if reference is not None:
            differences.append(percent - reference)
        rows.append(
            {
                "system": _name(cell.learners),
                "learners": max(1, cell.learners),
                "chips": cell.chips,
                "goodput_percent": percent,
                "published_percent": reference,
                "merged_learners": found.merged_learners,
            }
        )
    squares = [difference**2 for difference in differences]
    return {
        "schema_version": 1,
        "cells": rows,
        "difference_rms": math.sqrt(sum(squares) / len(squares)) if squares else None,
        "difference_largest": max(map(abs, differences)) if differences else None,
    }


def _name(learners: int) -> str:
    names = {0: "data parallel, restarts", 1: "data parallel, elastic"}
    return names.get(learners, f"Decoupled, {learners} learners")


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich.table import Table

    from gossamer.units import format_count

    columns = list(dict.fromkeys(row["chips"] for row in rows))
    table = Table(title="goodput in percent (paper)")
    table.add_column("chips")
    for chips in columns:
        table.add_column(format_count(chips), justify="right")
    for system in dict.fromkeys(row["system"] for row in rows):
        cells = {row["chips"]: row for row in rows if row["system"] == system}
        table.add_row(system, *(_cell(cells[chips]) for chips in columns))
    return table


def _cell(row: dict[str, Any]) -> str:
    reference = row["published_percent"]
    return f"{row['goodput_percent']:.0f}" + (f" ({reference})" if reference is not None else "")
