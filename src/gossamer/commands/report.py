"""`gossamer report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.commands.options import JsonOption, print_json, print_note
from gossamer.errors import ConfigError

if TYPE_CHECKING:
    from gossamer.report.plots import Curve
    from gossamer.report.run_folder import RunFolder


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN|COMPARISON", help="Folder of a run or a comparison.")
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where page and pictures go; default: there."),
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw pictures and write report.html.")] = True,
    json: JsonOption = False,
) -> None:
    """Tabulate a run or a comparison; draw loss over virtual time and over bytes sent.

    Writes report.html, loss_over_time.png and loss_over_bytes.png (with the extra gossamer[plot]).

    Examples:

        gossamer report runs/demo-1

        gossamer report runs/diloco-1 --no-plots
    """
    from gossamer.report.files import SCHEMA_VERSION, write_atomically
    from gossamer.report.html import page
    from gossamer.report.plots import draw
    from gossamer.report.run_folder import make_folder
    from gossamer.report.tables import comparison_table, stdout_console

    rows, curves = _read(folder)
    target = out or folder
    if plots:
        make_folder(target)
    files: list[str] = []
    if plots:
        images = draw(curves)
        for name, image in images.items():
            write_atomically(target / f"{name}.png", image)
            files.append(str(target / f"{name}.png"))
        recipe = (folder / "config.toml").read_text(encoding="utf-8")
        title = f"Gossamer: {folder.resolve().name}"
        write_atomically(target / "report.html", page(title, rows, images, recipe))
        files.append(str(target / "report.html"))
    if json:
        print_json({"schema_version": SCHEMA_VERSION, "rows": rows, "files": files})
        return
    stdout_console().print(comparison_table(rows))
    if files:
        print_note("written: " + ", ".join(files))


def _read(folder: Path) -> tuple[list[dict[str, Any]], list[Curve]]:
    """The rows of the table, and each run's label with its measurements."""
    from gossamer.report.comparison import Comparison, is_comparison
    from gossamer.report.plots import Curve
    from gossamer.report.run_folder import RunFolder

    if not folder.is_dir():
        raise ConfigError(f"no folder {str(folder)!r}; give the folder of a run or a comparison")
    if is_comparison(folder):
        comparison = Comparison.reopen(folder)
        rows = comparison.rows()
        runs = [comparison.folder_of(entry) for entry in comparison.entries]
    else:
        rows, runs = [RunFolder(folder).summary()], [RunFolder(folder)]
    labels = [str(row.get("label", row["method"])) for row in rows]
    return rows, [Curve(label, _measured(run)) for label, run in zip(labels, runs, strict=True)]


def _measured(run: RunFolder) -> list[dict[str, Any]]:
    """The run's measurements, each with the bytes that a worker had sent by then."""
    workers = run.summary()["workers"]
    sent = {e["round"]: e["bytes_sent_total"] / workers for e in run.events("round")}
    return [{"bytes_sent": sent.get(e["round"]), **e} for e in run.events("measure")]
