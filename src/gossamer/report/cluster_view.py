"""What a cluster run looks like while it goes on: one live table, or a plain line a round."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gossamer.units import format_bytes, format_duration

Status = Mapping[str, Any]  # the coordinator's status, as JSON
STYLES = {"running": "green", "joining": "yellow", "waiting": "yellow", "lost": "red"}


class ClusterView:
    """A table that follows a run on a terminal; elsewhere only what `say` is told.

    Args:
        title: of the run.
        console: where to; default stderr.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.title = title
        self._live: Live | None = None

    def __enter__(self) -> ClusterView:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def is_live(self) -> bool:
        """Whether there is a table that shows each round anyway."""
        return self._live is not None

    def update(self, status: Status, *, states: Mapping[int, str], time_s: float) -> None:
        """Show the run as it is now.

        Args:
            status: the coordinator's.
            states: what the launcher says of each worker's process, where that is something.
            time_s: since the first worker began.
        """
        if self._live is not None:
            self._live.update(self.render(status, states, time_s), refresh=True)

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def render(self, status: Status, states: Mapping[int, str], time_s: float) -> RenderableType:
        """Title, progress, and a row for each worker."""
        workers = {row["worker"]: row for row in status["workers"]}
        done = min((w["rounds_completed"] for w in workers.values() if _trains(w)), default=0)
        total = status["num_rounds"]
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=total, completed=done, width=24)
        left = f", about {format_duration(time_s / done * (total - done))} left" if done else ""
        head.add_row(Text(self.title, style="bold"), bar, f"{done} of {total} rounds{left}")
        parts: list[RenderableType] = [head]
        if status["note"]:
            parts.append(Text(status["note"], style="yellow"))
        return Group(*parts, _table(status, workers, states))


def _trains(worker: Mapping[str, Any]) -> bool:
    return worker["role"] == "worker" and worker["phase"] in ("running", "finished")


def _table(
    status: Status, workers: Mapping[int, Mapping[str, Any]], states: Mapping[int, str]
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("worker", "phase", "in", "rounds", "loss", "utilisation", "blocked", "sent"):
        table.add_column(heading, justify="left" if heading in ("worker", "phase") else "right")
    table.add_column("note", overflow="ellipsis", no_wrap=True)
    members = status["members"]
    for index in sorted({*range(status["num_workers"]), *workers}):
        row = workers.get(index)
        if row is not None and row["role"] == "syncer":
            table.add_row(*_syncer_row(row, index - status["num_workers"], states.get(index, "")))
            continue
        state = states.get(index, "")
        if row is None:
            table.add_row(str(index), Text("starting", "dim"), "", "", "", "", "", "", state)
            continue
        phase = Text(row["phase"], STYLES.get(row["phase"], ""))
        table.add_row(
            str(index),
            phase,
            "yes" if index in members and row["alive"] else "no",
            str(row["rounds_completed"]),
            "-" if row["loss"] is None else f"{row['loss']:.3f}",
            f"{row['utilization']:.0%}",
            format_duration(row["blocked_s"]),
            format_bytes(row["bytes_sent"]),
            state or _note(row),
        )
    return table


def _syncer_row(row: Mapping[str, Any], index: int, state: str) -> list[Text | str]:
    """It is in no membership, and counts no rounds."""
    phase = Text(row["phase"], STYLES.get(row["phase"], ""))
    sent = format_bytes(row["bytes_sent"])
    return [f"syncer {index}", phase, "", "", "", "", "", sent, state or _note(row)]


def _note(row: Mapping[str, Any]) -> str:
    if row["donor"] is not None:
        return f"takes the state of worker {row['donor']}"
    if row["joiners"]:
        return "gives its state to " + ", ".join(str(j) for j in row["joiners"])
    if row["why"]:
        return str(row["why"])
    if row["alive"] and row["progress_age_s"] > 10:
        return f"no progress for {format_duration(row['progress_age_s'])}"
    return ""


def round_line(event: Mapping[str, Any], num_rounds: int) -> str:
    """A finished round as one plain line."""
    loss = event["train_loss"]
    parts = [
        f"round {event['round']}/{num_rounds}",
        *([] if loss is None else [f"loss {loss:.3f}"]),
        f"{event['workers']} workers",
        f"{event['utilization']:.1%} utilised",
        f"{format_bytes(event['bytes_sent_total'])} sent",
        format_duration(event["time_s"]),
    ]
    return " · ".join(parts)
