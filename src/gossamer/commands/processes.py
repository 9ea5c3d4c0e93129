"""`gossamer coordinator` and `gossamer worker`: the processes of a cluster run, one by one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.commands.options import (
    JsonOption,
    OptionalRecipeArgument,
    RecipeArgument,
    SetOption,
    print_json,
    print_note,
)
from gossamer.errors import ConfigError, Interrupted
from gossamer.worlds import refuse_measuring

if TYPE_CHECKING:
    from gossamer.cluster.certs import Credentials
    from gossamer.cluster.syncer import SyncerProcess
    from gossamer.cluster.worker import WorkerProcess
    from gossamer.config import Recipe

CertsOption = Annotated[
    Path | None,
    typer.Option(
        "--certs",
        metavar="DIR",
        help="Folder with this process's certificate (`gossamer certs`); needed off this machine.",
    ),
]


# What a coordinator without a recipe can be told by --set.
OWN_LOOP_SETTINGS = (
    "seed",
    "network.deadline",
    "cluster.coordinator",
    "cluster.certificates",
    "cluster.min_workers",
    "cluster.start_timeout",
    "cluster.joiners_per_donor",
    "cluster.rejoin_moments",
)


def coordinator(
    recipe: OptionalRecipeArgument = None,
    *,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where; default: the recipe's cluster.coordinator."),
    ] = None,
    certs: CertsOption = None,
    store: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Keeps the run, so that it can be started again."),
    ] = Path("coordinator.sqlite"),
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="Without a RECIPE, for programs that use `gossamer.join`: their method.",
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="With --method: how many.")] = None,
    rounds: Annotated[int | None, typer.Option(help="With --method: how many.")] = None,
    changes: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Coordinate a run between machines: who takes part, and who gives a newcomer its state.

    It is small and no data passes through it. When it dies the workers go on; started again at the
    same address with the same --store, it does too.

    Examples:

        gossamer coordinator my.toml --listen 10.0.0.1:7700 --certs certs

        gossamer coordinator --method diloco:inner_steps=50 --workers 2 --rounds 20
    """
    require_cluster_extra()
    from gossamer.cluster.coordinator import serve
    from gossamer.deployment import coordinator_of, credentials_of, job_of

    if recipe is None:
        loaded, configuration = _of_own_loops(method, workers, rounds, changes or [])
    elif method is None and workers is None and rounds is None:
        loaded = load_cluster_recipe(recipe, changes or [])
        refuse_measuring(loaded)
        configuration = job_of(loaded).configuration
    else:
        raise ConfigError("a RECIPE says it all; --method, --workers and --rounds are instead")
    settings = coordinator_of(loaded, configuration, store=store, listen=listen)
    _refuse_ended(store)
    credentials = credentials_of(certs or loaded.cluster.certificates, "coordinator")

    async def work() -> Any:
        stop = asyncio.Event()
        with signals_call(stop.set):
            return await serve(
                settings,
                credentials=credentials,
                stop=stop,
                listener=_tell_of_run,
                on_start=lambda address: print_note(f"coordinator at {address}"),
            )

    status = asyncio.run(work())
    if json:
        print_json(status.model_dump(mode="json"))
    if status.phase != "ended":
        raise Interrupted(
            f"stopped; the run is in {store}, and goes on when this command is given again"
        )
    print_note(f"the run has ended after {status.num_rounds} rounds")


def _of_own_loops(
    method: str | None, workers: int | None, rounds: int | None, changes: list[str]
) -> tuple[Recipe, dict[str, Any]]:
    """Settings and configuration of a run whose training is not Gossamer's."""
    from gossamer.cluster.job import DEADLINE_S, own_configuration
    from gossamer.config import apply_overrides, build_recipe, variant

    if method is None or workers is None or rounds is None:
        raise ConfigError(
            "give a RECIPE, or --method, --workers and --rounds for programs that join by "
            "themselves"
        )
    for change in changes:
        key = change.partition("=")[0].strip()
        if key not in OWN_LOOP_SETTINGS:
            raise ConfigError(
                f"--set {key}: would be ignored, as the programs that join train by themselves; "
                f"without a RECIPE there are {', '.join(OWN_LOOP_SETTINGS)}"
            )
    tables = {
        "method": {"name": "diloco"},
        "train": {"workers": workers, "rounds": rounds},
        "run": {"world": "cluster"},
    }
    base = build_recipe(apply_overrides(tables, changes), base=Path.cwd())
    recipe = variant(base, method)
    if recipe.method.num_syncers:
        raise ConfigError(
            f"{recipe.method.name} has a syncer, which must know the model: it runs from a RECIPE"
        )
    return recipe, own_configuration(
        recipe.method,
        workers=recipe.train.workers,
        rounds=recipe.train.rounds,
        seed=recipe.seed,
        deadline_s=recipe.network.deadline or DEADLINE_S,
        moments=recipe.cluster.rejoin_moments,
    )


def _refuse_ended(path: Path) -> None:
    from gossamer.cluster.store import Store

    if not path.is_file():
        return
    store = Store(path)
    try:
        saved = store.load()
    finally:
        store.close()
    if saved is not None and saved["membership"]["phase"] == "ended":
        raise ConfigError(f"the run in {path} has ended; name another --store for a new one")


def worker(
    recipe: RecipeArgument,
    *,
    join: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="The coordinator; default: the recipe's cluster.coordinator."
        ),
    ] = None,
    index: Annotated[
        int | None, typer.Option(metavar="I", help="Which worker; default: one that is free.")
    ] = None,
    certs: CertsOption = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where this worker listens; port 0: any free one."),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the others reach it, if that differs."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Checkpoints and results; {run} stands for the run's id."),
    ] = Path("runs/cluster-{run}"),
    changes: SetOption = None,
    json: JsonOption = False,
    tied: Annotated[bool, typer.Option("--tied", hidden=True)] = False,
) -> None:
    """Be one worker of a run: join, train, and come back where it left off if started again.

    The recipe must be the coordinator's; what differs is refused by name.

    Examples:

        gossamer worker my.toml --join 10.0.0.1:7700 --index 0 --certs certs --listen 10.0.0.2:7701

        gossamer worker my.toml --join 127.0.0.1:7700
    """
    require_cluster_extra()
    import torch

    from gossamer.cluster.certs import certified_worker
    from gossamer.cluster.process_memory import return_freed_memory
    from gossamer.cluster.worker import WorkerProcess
    from gossamer.deployment import credentials_of, job_of

    return_freed_memory()
    loaded = load_cluster_recipe(recipe, changes or [])
    if not tied:
        refuse_measuring(loaded)
    cluster = loaded.cluster
    if loaded.run.threads is not None:
        torch.set_num_threads(loaded.run.threads)
    folder = certs or (Path(cluster.certificates) if cluster.certificates else None)
    if folder is not None and index is None:
        index = certified_worker(folder)
    credentials: Credentials | None = credentials_of(folder, f"worker-{index}")
    process = WorkerProcess(
        job_of(loaded),
        coordinator=join or cluster.coordinator,
        listen=listen or cluster.listen,
        advertise=advertise,
        credentials=credentials,
        folder=out,
        worker=index,
        rate=cluster.rate,
        delay_s=cluster.delay,
        events=tell_launcher if tied else tell_people,
        digests=False,
    )
    if not tied:
        print_note(f"joining the run of the coordinator at {join or cluster.coordinator}")
    summary = asyncio.run(take_part(process, tied=tied))
    if tied:
        tell_launcher("end", summary)
    elif json:
        print_json(summary)
    else:
        print_note(f"worker {process.worker} is done; files: {process.root}")


async def take_part(process: WorkerProcess | SyncerProcess, *, tied: bool) -> dict[str, Any]:
    """Run a process until it ends, or a signal (or the launcher's end) stops it."""
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None

    def stop() -> None:
        if not process.stopped:
            process.stop()
            main.cancel()

    if tied:
        threading.Thread(target=_wait_for_launcher, args=(loop, stop), daemon=True).start()
    with signals_call(stop):
        try:
            return await process.run()
        except asyncio.CancelledError:
            if not process.stopped:
                raise
    raise Interrupted("stopped; the same command goes on from the newest checkpoint")


def _wait_for_launcher(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """The launcher holds the other end of stdin: its end is this worker's too."""
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):  # the loop is closed: this process is ending anyway
        loop.call_soon_threadsafe(stop)


def _tell_of_run(kind: str, fields: dict[str, Any]) -> None:
    if fields.get("start") != "wait":  # which says only that nothing is decided yet
        print_note(describe(kind, fields))


def tell_launcher(kind: str, fields: dict[str, Any]) -> None:
    """One event a line; a launcher that is gone needs none (its end stops this worker)."""
    line = json.dumps({"kind": kind, **fields}) + "\n"
    with contextlib.suppress(BrokenPipeError):
        os.write(1, line.encode())


def tell_people(kind: str, fields: dict[str, Any]) -> None:
    """One event a line on stderr."""
    print_note(describe(kind, fields))


# ---------------------------------------------------------------------------------------- helpers


def describe(kind: str, fields: dict[str, Any]) -> str:
    """An event as one line for people."""
    shown = {k: v for k, v in fields.items() if v is not None and not isinstance(v, dict)}
    parts = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items()]
    return f"{kind}: " + ", ".join(parts)


def load_cluster_recipe(path: Path, changes: list[str]) -> Recipe:
    """A recipe, checked as one for the cluster world. Raises `ConfigError`."""
    from gossamer.config import load_recipe, prepare

    recipe = load_recipe(path, [*changes, "run.world=cluster"])
    prepare(recipe)
    return recipe


def require_cluster_extra() -> None:
    """Raises `ConfigError` where the extra is not installed."""
    try:
        import cryptography  # noqa: F401
        import grpc  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a cluster run needs {error.name}; install the extra: pip install 'gossamer[cluster]'"
        ) from None


@contextlib.contextmanager
def signals_call(stop: Callable[[], None]) -> Iterator[None]:
    """Let SIGINT and SIGTERM call `stop` in the running loop; a second one ends at once."""
    loop = asyncio.get_running_loop()
    asked = False

    def handle() -> None:
        nonlocal asked
        if asked:
            sys.stderr.flush()
            os._exit(130)
        asked = True
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
