"""`gossamer plan rounds`: how many rounds each method needs, by the theory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.commands.options import JsonOption, print_json
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from gossamer.measure.round_complexity import RoundPlan


def plan_rounds(
    *,
    samples: Annotated[
        str, typer.Option(metavar="N", help="Samples in all, such as 60000, 1.28M or 15T.")
    ],
    workers: Annotated[int, typer.Option(metavar="M", help="Number of workers.")],
    json: JsonOption = False,
) -> None:
    """Rounds that each method needs before more of them no longer help, by the theory.

    From so many rounds on the excess loss on convex problems is that of the best method there is,
    up to a constant. Constants are left out: compare the rows, do not count on the numbers.

    Examples:

        gossamer plan rounds --samples 1.28M --workers 8

        gossamer plan rounds --samples 15T --workers 64 --json
    """
    from gossamer.measure.round_complexity import plan_rounds as needed_rounds
    from gossamer.report.tables import stdout_console
    from gossamer.units import parse_count

    try:
        count = parse_count(samples)
    except ValueError as error:
        raise ConfigError(f"--samples: {error}") from None
    plan = needed_rounds(count, workers)
    if json:
        print_json(_as_json(plan))
        return
    console = stdout_console()
    console.print(_table(plan))
    for line in _conclusions(plan):
        console.print(line, soft_wrap=True)


def _as_json(plan: RoundPlan) -> dict[str, Any]:
    rows = [
        {
            "method": need.method,
            "formula": need.formula,
            "rounds": need.rounds,
            "samples_per_round": need.samples_per_round,
            "vectors": need.vectors,
            "is_possible": need.is_possible,
        }
        for need in plan.needs
    ]
    return {
        "schema_version": 1,
        "samples": plan.samples,
        "workers": plan.workers,
        "fewest_rounds": plan.needs[0].method,
        "crossover_workers": plan.crossover_workers,
        "asgd_over_mixvr": plan.asgd_over_mixvr,
        "rows": rows,
    }


def _table(plan: RoundPlan) -> Any:
    from rich import box
    from rich.table import Table

    from gossamer.units import format_count

    table = Table(
        title=f"N = {format_count(plan.samples)} samples, M = {plan.workers} workers",
        title_justify="left",
        title_style="italic",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    headings = (
        "method",
        "R_min",
        "rounds",
        "samples a round\nand worker",
        "model vectors\naveraged",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading in headings[:2] else "right")
    for need in plan.needs:
        samples = format_count(need.samples_per_round) if need.is_possible else "none left"
        counts = (_rounded(need.rounds), samples, _rounded(need.vectors))
        table.add_row(need.method, need.formula, *counts)
    return table


def _conclusions(plan: RoundPlan) -> list[str]:
    ratio, crossover = plan.asgd_over_mixvr, plan.crossover_workers
    lines = [
        f"Fewest rounds: {plan.needs[0].method}. Crossover M = N^(1/4) = {crossover:.4g}: with "
        f"fewer workers local_mixvr needs fewer rounds than minibatch_asgd, with more it needs "
        f"more."
    ]
    if ratio >= 1:
        lines.append(f"Here minibatch_asgd needs {ratio:.4g} times the rounds of local_mixvr.")
    else:
        lines.append(f"Here local_mixvr needs {1 / ratio:.4g} times the rounds of minibatch_asgd.")
    lines.append(
        "A round of local_mixvr averages three vectors (w, x and d), one of minibatch_asgd one: "
        f"the bytes are equal at M = N^(1/4) / 3 = {crossover / 3:.4g}."
    )
    return lines


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
