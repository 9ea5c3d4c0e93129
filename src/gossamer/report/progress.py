"""Live progress on stderr: bars on a terminal, a plain line now and then elsewhere.

Nothing is shown for what takes less than two seconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gossamer.units import format_duration

QUIET_S = 2.0  # what is over sooner shows nothing
LINE_EVERY_S = 10.0  # between plain lines where stderr is no terminal
REFRESH_S = 0.1


class Display:
    """Progress of one or several runs, one after another; use as a context manager.

    Args:
        num_runs: how many there will be; with more than one an overall bar is added.
        console: where to; default stderr.
    """

    def __init__(self, num_runs: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._num_runs = num_runs
        self._num_done = 0
        self._begun = self._last_line = time.monotonic()
        self._bars: Progress | None = None
        self._overall: TaskID | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def run(self, label: str) -> RunProgress:
        """The next run's listener."""
        return RunProgress(self, label)

    def show(self, run: RunProgress, *, at_end: bool = False) -> None:
        """Bring what is shown up to date; cheap when there is nothing to do yet."""
        now = time.monotonic()
        if now - self._begun < QUIET_S:
            return
        if self.console.is_terminal:
            self._show_bars(run)
        elif now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            line = run.line(self._position())
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        if at_end:
            self._finish(run)

    def finish(self, run: RunProgress) -> None:
        """A run is over."""
        self.show(run, at_end=True)
        self._num_done += 1

    def say(self, message: str) -> None:
        """A message among the bars."""
        console = self._bars.console if self._bars is not None else self.console
        console.print(message, markup=False, highlight=False, soft_wrap=True)

    def _position(self) -> str:
        return f"[{self._num_done + 1}/{self._num_runs}] " if self._num_runs > 1 else ""

    def _show_bars(self, run: RunProgress) -> None:
        if self._bars is None:
            self._bars = Progress(*_columns(), console=self.console, refresh_per_second=5)
            if self._num_runs > 1:
                self._overall = self._bars.add_task("all methods", total=self._num_runs, info="")
            self._bars.start()
        if run.bar is None:
            run.bar = self._bars.add_task(run.label, total=run.total_steps or None, info="")
        self._bars.update(
            run.bar, completed=run.steps, total=run.total_steps or None, info=run.info()
        )
        if self._overall is not None:
            self._bars.update(self._overall, completed=self._num_done + run.share())

    def _finish(self, run: RunProgress) -> None:
        if self._bars is None or run.bar is None:
            return
        self._bars.stop_task(run.bar)
        if self._overall is not None:
            self._bars.update(self._overall, completed=self._num_done + 1)


class RunProgress:
    """What one run has told so far; a listener of the simulator."""

    def __init__(self, display: Display, label: str) -> None:
        self.label = label
        self.total_steps = 0
        self.steps = 0
        self.bar: TaskID | None = None
        self._display = display
        self._latest: dict[str, Any] = {}
        self._shown_at = 0.0

    def on_start(self, total_steps: int, start_steps: int) -> None:
        self.total_steps, self.steps = total_steps, start_steps

    def on_steps(self, num_steps: int) -> None:
        self.steps += num_steps
        now = time.monotonic()
        if now - self._shown_at >= REFRESH_S:
            self._shown_at = now
            self._display.show(self)

    def on_event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind in ("round", "measure", "end"):
            self._latest.update(fields)

    def share(self) -> float:
        """Of the run that is done, 0 to 1."""
        return min(1.0, self.steps / self.total_steps) if self.total_steps else 0.0

    def info(self) -> str:
        """ "round 12 · loss 2.413 · 1.3 h virtual · 35.9 % utilised"; what is known so far."""
        known = self._latest
        parts = []
        if (rounds := known.get("round")) is not None:
            parts.append(f"round {rounds}")
        if (loss := known.get("train_loss")) is not None:
            parts.append(f"loss {loss:.3f}")
        if (seconds := known.get("time_s")) is not None:
            parts.append(f"{format_duration(seconds)} virtual")
        if (utilization := known.get("utilization")) is not None:
            parts.append(f"{utilization:.1%} utilised")
        return " · ".join(parts)

    def line(self, position: str = "") -> str:
        """One plain line of progress."""
        info = self.info()
        return f"{position}{self.label}: {self.share():.0%}" + (f" · {info}" if info else "")


def _columns() -> list[ProgressColumn]:
    return [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[info]}", markup=False),
    ]
