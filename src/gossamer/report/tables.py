"""The tables that people read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]  # a summary, with "label" in a comparison


@dataclass(frozen=True, slots=True)
class Unit:
    """A name for the heading, and its size."""

    name: str
    size: float


_TIME_UNITS = (Unit("hours", 3600.0), Unit("minutes", 60.0), Unit("seconds", 1.0))
_BYTE_UNITS = (Unit("GB", 1e9), Unit("MB", 1e6), Unit("kB", 1e3))


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the comparison: heading, the summary's key, how its value is written.

    Where there are `units`, the heading's {} is the largest in which some row is 1 or more, one
    for the whole column so that its numbers can be compared.
    """

    heading: str
    key: str
    show: Callable[[Any], str]
    units: tuple[Unit, ...] = (Unit("", 1.0),)
    only_if_nonzero: bool = False


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


COLUMNS = (
    Column("eval\nloss", "eval_loss", lambda v: f"{v:.4f}"),
    Column("perplexity", "eval_perplexity", lambda v: f"{v:.2f}"),
    Column("accuracy", "eval_accuracy", lambda v: f"{v:.1%}"),
    Column("excess\nloss", "eval_excess_loss", lambda v: f"{v:.3g}"),
    Column("util-\nisation", "utilization", lambda v: f"{v:.1%}"),
    Column("virtual\n{}", "time_s", _number, units=_TIME_UNITS),
    Column("{} sent\n/ worker", "bytes_sent", _number, units=_BYTE_UNITS),
    Column("consensus\nL2", "consensus_l2", _number),
    Column("JS\ndistance", "js_distance", lambda v: f"{v:.4f}"),
    Column("failed", "failed_transfers", _number, only_if_nonzero=True),
    Column("retries", "retries", _number, only_if_nonzero=True),
)


def table_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings, and each row's cells; "-" for what was not measured.

    Columns of which no row knows anything are left out.
    """
    headings = ["method"]
    body = [[str(row.get("label", row.get("method", "run")))] for row in rows]
    for column in COLUMNS:
        values = [row.get(column.key) for row in rows]
        known = [value for value in values if value is not None]
        if not (any(known) if column.only_if_nonzero else known):
            continue
        fitting = [u for u in column.units if max(abs(v) for v in known) >= u.size]
        unit = fitting[0] if fitting else column.units[-1]
        heading = column.heading.format(unit.name)
        if any(row.get("world") == "cluster" for row in rows):
            heading = heading.removeprefix("virtual\n")
        headings.append(heading)
        for cells, value in zip(body, values, strict=True):
            cells.append("-" if value is None else column.show(value / unit.size))
    return headings, body


def comparison_table(rows: Sequence[Row]) -> Table:
    """One row a run."""
    headings, body = table_cells(rows)
    table = Table(
        title=_setting(rows),
        title_justify="left",
        title_style="italic",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,  # 80 columns hold it all
    )
    table.add_column(headings[0], overflow="fold", min_width=8, vertical="bottom")
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for cells in body:
        table.add_row(*cells)
    return table


def fields_table(title: str, fields: Mapping[str, str]) -> Table:
    """Two columns, a name and its value."""
    table = Table(
        title=title,
        show_header=False,
        title_justify="left",
        title_style="italic",
        box=box.SIMPLE,
    )
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(name, value)
    return table


def stdout_console() -> Console:
    """For tables on stdout: as wide as the terminal, and wide enough where it is none."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(width=160, highlight=False, markup=False)


def _setting(rows: Sequence[Row]) -> str:
    """What the rows have in common, for the title."""
    first = rows[0] if rows else {}
    parts = []
    for key, text in (
        ("workers", "{} workers"),
        ("rounds", "{} rounds"),
        ("inner_steps", "{} inner steps a round"),
        ("seed", "seed {}"),
    ):
        value = first.get(key)
        if value is not None and all(row.get(key) == value for row in rows):
            parts.append(text.format(value))
    return ", ".join(parts)
