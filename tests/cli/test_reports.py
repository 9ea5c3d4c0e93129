"""Tables, pictures and progress: what people see of a run."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gossamer.report import progress as progress_module
from gossamer.report.html import page
from gossamer.report.plots import AXES, Curve, points
from gossamer.report.progress import Display
from gossamer.report.tables import comparison_table, table_cells

Gossamer = Callable[..., Any]
PNG = b"\x89PNG\r\n\x1a\n"


def row(**fields: Any) -> dict[str, Any]:
    return {"label": "diloco", "eval_loss": 2.0, "failed_transfers": 0, "retries": 0, **fields}


def test_columns_appear_only_where_they_say_something() -> None:
    headings, _ = table_cells([row(), row(eval_loss=None)])
    assert headings == ["method", "eval\nloss"]
    headings, body = table_cells([row(failed_transfers=3), row()])
    assert headings == ["method", "eval\nloss", "failed"]
    assert body == [["diloco", "2.0000", "3"], ["diloco", "2.0000", "0"]]


@pytest.mark.parametrize(
    ("seconds", "heading", "shown"),
    [
        ([7200.0, 36.0], "virtual\nhours", ["2", "0.01"]),
        ([90.0, 6.0], "virtual\nminutes", ["1.5", "0.1"]),
        ([0.5, 0.25], "virtual\nseconds", ["0.5", "0.25"]),
        ([3.6e6 * 1.5, 3600.0], "virtual\nhours", ["1,500", "1"]),
        ([0.0, 0.0], "virtual\nseconds", ["0", "0"]),
    ],
)
def test_a_column_has_one_unit(seconds: list[float], heading: str, shown: list[str]) -> None:
    headings, body = table_cells([{"label": "x", "time_s": value} for value in seconds])
    assert headings[1] == heading
    assert [cells[1] for cells in body] == shown


def test_the_table_of_the_demo_fits_into_80_columns_with_all_its_numbers() -> None:
    full = {
        "eval_loss": 2.4123,
        "eval_perplexity": 11.16,
        "utilization": 0.561,
        "time_s": 57600.0,
        "bytes_sent": 63e9,
        "consensus_l2": 0.123,
        "js_distance": 0.0456,
    }
    rows = [{"label": "GlobalM1LocalM2-subset", **full}, {"label": "diloco", **full}]
    console = Console(file=io.StringIO(), width=80)
    console.print(comparison_table(rows))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in output.splitlines()) <= 80
    for text in ("2.4123", "11.16", "56.1%", "16", "63", "0.123", "0.0456", "perplexity", "diloco"):
        assert text in output


def test_the_page_escapes_what_it_shows() -> None:
    html = page("<title>", [row(label="a<b&c")], {"loss": PNG}, "x = '<script>'")
    assert "<script>" not in html
    assert "a&lt;b&amp;c" in html
    assert "data:image/png;base64," in html


def test_points_leave_out_what_was_not_measured() -> None:
    events = [
        {"time_s": 3600.0, "eval_loss": 3.0},
        {"time_s": 7200.0, "eval_loss": None},
        {"eval_loss": 2.0},
    ]
    assert points(Curve("x", events), AXES[0]) == [(1.0, 3.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # matplotlib's own
def test_report_writes_page_and_pictures(gossamer: Gossamer, folder: Path, simulation: Any) -> None:
    methods = ["--method", "diloco", "--method", "GlobalM1"]
    gossamer("compare", "recipe.toml", *methods, "--out", "c")
    outcome = gossamer("report", "c", "--json")
    assert outcome.code == 0
    names = [Path(name).name for name in outcome.json["files"]]
    assert names == ["loss_over_time.png", "loss_over_bytes.png", "report.html"]
    for name in names[:2]:
        assert (folder / "c" / name).read_bytes().startswith(PNG)
    html = (folder / "c" / "report.html").read_text()
    assert html.count("data:image/png") == 2
    assert "GlobalM1" in html
    assert gossamer("report", "c/diloco", "--out", "elsewhere").code == 0
    assert (folder / "elsewhere" / "report.html").is_file()


def test_report_without_matplotlib_names_the_extra(
    gossamer: Gossamer, folder: Path, simulation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gossamer("train", "recipe.toml", "--out", "o")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    outcome = gossamer("report", "o")
    assert outcome.code == 2
    assert "gossamer[plot]" in outcome.error_line
    assert "--no-plots" in outcome.error_line
    assert gossamer("report", "o", "--no-plots").code == 0
    assert not (folder / "o" / "report.html").exists()


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(progress_module, "time", fake)
    return fake


def test_plain_progress_is_a_line_every_ten_seconds(clock: FakeClock) -> None:
    out = io.StringIO()
    with Display(2, Console(file=out, width=200)) as display:
        run = display.run("diloco")
        run.on_start(100, 0)
        for _ in range(50):
            clock.now += 0.5
            run.on_event("round", {"round": 3, "train_loss": 2.5, "time_s": 7200.0})
            run.on_steps(2)
        display.finish(run)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2  # 25 seconds
    assert lines[0] == "[1/2] diloco: 40% · round 3 · loss 2.500 · 2.0 h virtual"


def test_what_is_quick_shows_nothing(clock: FakeClock) -> None:
    for terminal in (True, False):
        out = io.StringIO()
        with Display(1, Console(file=out, force_terminal=terminal, width=200)) as display:
            run = display.run("diloco")
            run.on_start(10, 0)
            clock.now += 1.0
            run.on_steps(10)
            display.finish(run)
        assert out.getvalue() == ""


def test_bars_show_the_whole_and_the_part(clock: FakeClock) -> None:
    out = io.StringIO()
    with Display(2, Console(file=out, force_terminal=True, width=200)) as display:
        for label in ("diloco", "GlobalM1"):
            run = display.run(label)
            run.on_start(100, 50)  # resumed
            clock.now += 5.0
            run.on_event("round", {"round": 3, "train_loss": 2.5, "utilization": 0.5})
            run.on_steps(25)
            assert run.share() == 0.75
            run.on_steps(25)
            display.finish(run)
    shown = out.getvalue()
    for text in ("all methods", "diloco", "GlobalM1", "round 3", "50.0% utilised"):
        assert text in shown
