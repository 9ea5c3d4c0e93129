"""`gossamer certs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gossamer.commands.options import JsonOption, print_json, print_note
from gossamer.errors import ConfigError


def certs(
    *,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files.")],
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", help="Certificates for workers 0 to N - 1.")
    ],
    syncers: Annotated[
        int,
        typer.Option("--syncers", metavar="N", help="And for syncers 0 to N - 1, if any."),
    ] = 0,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME|IP",
            help="Also put this name or address into every certificate. Repeatable.",
        ),
    ] = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Add what is missing to a folder made before.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Make a private certificate authority, and certificates for coordinator, workers and syncers.

    Each process needs ca.pem and its own NAME.pem and NAME-key.pem. Keep ca-key.pem away from the
    machines: whoever has it can join. Certificates are valid for a year; peers are known by the
    names in them (worker-0, ...), so addresses may change.

    Examples:

        gossamer certs --out certs --workers 8

        gossamer certs --out certs --workers 12 --extend
    """
    try:
        from gossamer.cluster.certs import issue
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"certificates need {error.name}; install the extra: pip install 'gossamer[cluster]'"
        ) from None

    files = issue(out, workers, host or [], extend=extend, num_syncers=syncers)
    if json:
        print_json({"folder": str(out), "files": [file.name for file in files]})
        return
    for file in files:
        typer.echo(str(file))
    print_note(f"{len(files)} files written; ca-key.pem stays with you")
