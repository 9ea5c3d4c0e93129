"""`gossamer syncer`: a process that gathers and merges for methods that have one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from gossamer.commands.options import JsonOption, RecipeArgument, SetOption, print_json, print_note
from gossamer.commands.processes import (
    CertsOption,
    load_cluster_recipe,
    require_cluster_extra,
    take_part,
    tell_launcher,
    tell_people,
)
from gossamer.worlds import refuse_measuring


def syncer(
    recipe: RecipeArgument,
    *,
    join: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Default: the recipe's cluster.coordinator."),
    ] = None,
    index: Annotated[
        int | None,
        typer.Option(metavar="I", help="From 0; default: the one in the certificate, or 0."),
    ] = None,
    certs: CertsOption = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where it listens; port 0: any free one."),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the others reach it, if that differs."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="What it has merged; {run} stands for the run's id."),
    ] = Path("runs/cluster-{run}"),
    changes: SetOption = None,
    json: JsonOption = False,
    tied: Annotated[bool, typer.Option("--tied", hidden=True)] = False,
) -> None:
    """Be a syncer of a run: gather from the workers, merge, and hand out, until they have ended.

    For methods that have one (decoupled_diloco). What it merges is on disk before anybody is told.
    When it dies the workers train on; started again with the same folder it goes on.

    Examples:

        gossamer syncer my.toml --join 10.0.0.1:7700 --certs certs --listen 10.0.0.9:7701
    """
    require_cluster_extra()
    import torch

    from gossamer.cluster.certs import certified_worker
    from gossamer.cluster.process_memory import return_freed_memory
    from gossamer.cluster.syncer import SyncerProcess
    from gossamer.deployment import credentials_of, job_of

    return_freed_memory()
    loaded = load_cluster_recipe(recipe, changes or [])
    if not tied:
        refuse_measuring(loaded)
    cluster = loaded.cluster
    if loaded.run.threads is not None:
        torch.set_num_threads(loaded.run.threads)
    folder = certs or (Path(cluster.certificates) if cluster.certificates else None)
    if index is None:
        index = 0 if folder is None else certified_worker(folder, "syncer")
    address = join or cluster.coordinator
    process = SyncerProcess(
        job_of(loaded), coordinator=address, folder=out, index=index,
        listen=listen or cluster.listen, advertise=advertise,
        credentials=credentials_of(folder, f"syncer-{index}"),
        rate=cluster.rate, delay_s=cluster.delay, events=tell_launcher if tied else tell_people,
    )  # fmt: skip
    if not tied:
        print_note(f"joining the run of the coordinator at {address}")
    summary = asyncio.run(take_part(process, tied=tied))
    if tied:
        tell_launcher("end", summary)
    elif json:
        print_json(summary)
    else:
        print_note(f"syncer {process.index} is done; files: {process.root}")
