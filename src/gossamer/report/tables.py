"""The tables that people read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gossamer.units import format_duration

Row = Mapping[str, Any]  # a summary, with "label" in a comparison


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the comparison: heading, the summary's key, how its value is written."""

    heading: str
    key: str
    show: Callable[[Any], str]
    only_if_nonzero: bool = False


COLUMNS = (
    Column("eval\nloss", "eval_loss", lambda v: f"{v:.4f}"),
    Column("perplexity", "eval_perplexity", lambda v: f"{v:.2f}"),
    Column("accuracy", "eval_accuracy", lambda v: f"{v:.1%}"),
    Column("util-\nisation", "utilization", lambda v: f"{v:.1%}"),
    Column("virtual\nhours", "time_s", lambda v: f"{v / 3600:.3g}"),
    Column("GB sent\n/ worker", "bytes_sent", lambda v: f"{v / 1e9:.3g}"),
    Column("consensus\nL2", "consensus_l2", lambda v: f"{v:.3g}"),
    Column("JS\ndistance", "js_distance", lambda v: f"{v:.4f}"),
    Column("failed", "failed_transfers", lambda v: f"{v:.0f}", only_if_nonzero=True),
    Column("retries", "retries", lambda v: f"{v:.0f}", only_if_nonzero=True),
)


def shown_columns(rows: Sequence[Row]) -> list[Column]:
    """The columns that say something about these rows."""
    chosen = []
    for column in COLUMNS:
        values = [row.get(column.key) for row in rows]
        if any(values) if column.only_if_nonzero else any(v is not None for v in values):
            chosen.append(column)
    return chosen


def cells(row: Row, columns: Sequence[Column]) -> list[str]:
    """The row's label and values as text; "-" for what was not measured."""
    values = [(column, row.get(column.key)) for column in columns]
    shown = [column.show(value) if value is not None else "-" for column, value in values]
    return [str(row.get("label", row.get("method", "run"))), *shown]


def comparison_table(rows: Sequence[Row]) -> Table:
    """One row a run."""
    columns = shown_columns(rows)
    table = Table(
        title=_setting(rows),
        title_justify="left",
        title_style="italic",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,  # 80 columns hold it all
    )
    table.add_column("method", overflow="fold", min_width=8, vertical="bottom")
    for column in columns:
        table.add_column(column.heading, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*cells(row, columns))
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
    times = [row["train_time_s"] for row in rows if row.get("train_time_s") is not None]
    if times and max(times) == min(times):
        parts.append(f"{format_duration(times[0])} of training each")
    return ", ".join(parts)
