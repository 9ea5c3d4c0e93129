"""Options that several commands share, with one wording for each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

RecipeArgument = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="TOML file that describes the run.")
]
OptionalRecipeArgument = Annotated[
    Path | None, typer.Argument(metavar="[RECIPE]", help="TOML file that describes the run.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a setting, such as train.workers=4 or network.bandwidth=1Gbit/s. Repeatable.",
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Folder for the files; must be new or empty."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")
]
MethodOption = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME[:KEY=VALUE,...]",
        help="A method or preset, with hyperparameters; lists are joined by +. Repeatable.",
    ),
]


def print_json(content: dict[str, Any]) -> None:
    """The machine form of a command's result, on stdout."""
    from gossamer.report.files import to_json

    sys.stdout.write(to_json(content, indent=2) + "\n")


def print_note(message: str) -> None:
    """A line for people that is not the result: on stderr."""
    sys.stderr.write(message + "\n")
