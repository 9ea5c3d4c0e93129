"""One launched run, from the coordinator's start to the summary."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gossamer.cluster.addresses import is_wildcard, join_address, split_address
from gossamer.cluster.book import Book
from gossamer.cluster.certs import place_name
from gossamer.cluster.coordinator import Coordinator
from gossamer.cluster.export import Vectors, read_vectors, worker_folder
from gossamer.cluster.job import Job
from gossamer.cluster.launch import Starter, Supervisor
from gossamer.commands.processes import signals_call
from gossamer.config import Recipe
from gossamer.deployment import coordinator_of, credentials_of
from gossamer.errors import CheckpointError, Interrupted, RunFailed
from gossamer.measure.replicas import average, measure_replicas, sha256_of
from gossamer.report.cluster_view import ClusterView, round_line
from gossamer.report.files import SCHEMA_VERSION
from gossamer.report.run_folder import RunFolder
from gossamer.training.engine import Engine

REFRESH_S = 0.25
STOP_GRACE_S = 3.0  # Ctrl-C ends everything within 5 s, what comes after included

MakeStarter = Callable[[str], Starter]  # from the coordinator's address


@dataclass(frozen=True)
class Plan:
    """What is launched.

    Args:
        recipe: of the cluster world, with everything decided.
        run_id: of the run to go on with; None: a new one.
        earlier: the last round that an earlier session told of.
    """

    recipe: Recipe
    job: Job
    folder: RunFolder
    run_id: str | None = None
    earlier: Mapping[str, Any] | None = None


class Session:
    """Coordinator, worker processes and the view of them, until the run is over or stopped."""

    def __init__(self, plan: Plan, view: ClusterView, make_starter: MakeStarter) -> None:
        self._plan, self._view, self._make_starter = plan, view, make_starter
        recipe = plan.recipe
        self._workers = range(recipe.train.workers)
        self._places = range(recipe.train.workers + recipe.method.num_syncers)
        self._num_rounds = recipe.train.rounds
        self._book = Book(recipe.train.workers, plan.earlier, num_syncers=recipe.method.num_syncers)
        self._measurer = Measurer(plan)
        self._measuring: list[asyncio.Task[None]] = []
        self._losses: list[dict[str, Any]] = []
        self._finished: set[int] = set()
        self._stop = asyncio.Event()

    async def run(self) -> dict[str, Any]:
        """Carry the run out; its summary. Raises `Interrupted`, `ConfigError` or `RunFailed`."""
        recipe, folder = self._plan.recipe, self._plan.folder
        settings = coordinator_of(
            recipe,
            self._plan.job.configuration,
            store=folder.path / "coordinator.sqlite",
            run_id=self._plan.run_id,
        )
        credentials = credentials_of(recipe.cluster.certificates, "coordinator")
        self._coordinator = Coordinator(
            settings, credentials=credentials, listener=self._hear_coordinator
        )
        try:
            address = reachable(await self._coordinator.start())
            self._supervisor = Supervisor(
                self._make_starter(address),
                self._places,
                restarts=recipe.cluster.restarts,
                tell=self._hear_worker,
            )
            with signals_call(self._stop.set):
                await self._supervise()
        finally:
            await self._coordinator.close(0.2)
        if self._stop.is_set() and len(self._finished) < len(self._workers):
            self._measurer.close()
            raise Interrupted("the run was stopped")
        return await self._finish()

    async def _supervise(self) -> None:
        running = asyncio.create_task(self._supervisor.run())
        stopping = asyncio.create_task(self._stop.wait())
        failed = self._coordinator.failed
        assert failed is not None
        waits: list[asyncio.Future[Any]] = [running, stopping, failed]
        try:
            while not running.done() and not self._stop.is_set() and not failed.done():
                await asyncio.wait(waits, timeout=REFRESH_S, return_when="FIRST_COMPLETED")
                self._show()
                if self._coordinator.ended.is_set():
                    self._supervisor.let_go()
            if failed.done():
                failed.result()
            if self._stop.is_set():
                self._view.say("stopping after the step that each worker is in (again: at once)")
                late = await self._supervisor.stop(STOP_GRACE_S)
                if late:
                    names = ", ".join(self._name(place) for place in late)
                    self._view.say(f"killed, as their step took too long: {names}")
            await running
        finally:
            stopping.cancel()
            if not running.done():
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running

    def _show(self) -> None:
        if self._view.is_live:
            lives = self._supervisor.lives
            states = {w: life.state for w, life in lives.items() if life.state not in QUIET_STATES}
            status = self._coordinator.status().model_dump(mode="json")
            self._view.update(status, states=states, time_s=self._book.time_s(time.monotonic()))

    # ------------------------------------------------------------------------------------- events

    def _name(self, place: int) -> str:
        """Of a process, for people."""
        return place_name(place, len(self._workers)).replace("-", " ")

    def _record(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._plan.folder.record(kind, fields)

    def _hear_coordinator(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "lost" and self._stop.is_set():
            return  # they end because they were told to
        if fields.get("start") == "wait":
            return  # nothing is decided yet
        self._record(kind, fields)
        if kind == "lost":
            self._losses.append(fields)
            self._view.say(f"{self._name(fields['worker'])} is lost ({fields['cause']})")
            self._tell_rounds()
        elif kind == "joined" and fields["start"] == "donor":
            self._view.say(
                f"worker {fields['worker']} takes part from round {fields['round']} on, with the "
                f"state of worker {fields['donor']}"
            )

    def _hear_worker(self, worker: int, kind: str, fields: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if worker not in self._workers and kind in ("merged", "end"):
            self._book.told(worker, fields)
            return
        if kind == "boundary":
            self._book.boundary(worker, fields, now_s)
            self._tell_rounds()
            return
        if kind == "end":
            completed = fields["rounds_completed"]
            loss = fields["train_loss"]
            if fields["digest"] is not None:  # None: it came too late for the run
                self._finished.add(worker)
                self._book.boundary(worker, {**fields, "round": completed, "loss": loss}, now_s)
            self._tell_rounds()
            return
        if kind == "started":
            self._book.started(worker)
        self._record(kind, {"worker": worker, **fields})
        line = _LINES.get(kind)
        if line is not None and not (kind == "started" and fields["restarts"] == 0):
            self._view.say(f"{self._name(worker)} " + line.format(**fields))

    def _tell_rounds(self) -> None:
        seats = self._coordinator.membership.seats
        workers = seats[: len(self._workers)]
        taking_part = [s.worker for s in workers if s.phase in ("running", "finished")]
        for event in self._book.complete(taking_part, time.monotonic()):
            self._record("round", event)
            if not self._view.is_live:
                self._view.say(round_line(event, self._num_rounds))
            due = self._plan.recipe.measure.due(event["round"], self._num_rounds)
            if due and event["round"] < self._num_rounds and not self._stop.is_set():
                work = self._measure(event, taking_part)
                self._measuring.append(asyncio.get_running_loop().create_task(work))

    async def _measure(self, event: Mapping[str, Any], workers: Sequence[int]) -> None:
        """Evaluate a round from the workers' checkpoints of it, beside the run."""
        about = {"round": event["round"], "time_s": event["time_s"]}
        try:
            fields = await self._measurer.of_round(event["round"], workers)
        except CheckpointError as error:
            self._record("not_measured", {**about, "reason": str(error)})
            return
        self._record("measure", {**about, **fields})

    # ---------------------------------------------------------------------------------------- end

    async def _finish(self) -> dict[str, Any]:
        """Measure what the workers have left, write everything, and return the summary."""
        plan = self._plan
        await asyncio.gather(*self._measuring)
        if not self._finished:
            raise RunFailed("no worker has finished; each one's log.txt says why")
        vectors = self._measurer.finals(sorted(self._finished))
        measured = await self._measurer.of(vectors)
        engine = self._measurer.engine
        book = self._book.summary()
        rows = torch.stack([v[0] for v in vectors])
        rounds = plan.folder.events("round")
        event = {"round": self._num_rounds, "time_s": book["time_s"], **measured}
        self._record("measure", event)
        summary: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "method": plan.recipe.method.name,
            "world": "cluster",
            "workers": len(self._workers),
            "rounds": self._num_rounds,
            "inner_steps": plan.recipe.method.inner_steps,
            "parameters": engine.layout.numel,
            "unit": engine.unit,
            "tokens": book["samples"] if engine.unit == "tokens" else None,
            "train_loss": rounds[-1]["train_loss"] if rounds else None,
            "worker_eval_losses": None,
            **measured,
            **book,
            "lost": self._losses,
            "seed": plan.recipe.seed,
            "trace_hash": None,  # time is real: no two runs have the same trace
            "parameters_sha256": sha256_of(rows),
        }
        self._record("end", {"summary": summary})
        plan.folder.write_parameters(plan.recipe, rows, engine.state_dict(*average(vectors)))
        plan.folder.write_summary(summary)
        self._measurer.close()
        return summary


QUIET_STATES = ("starting", "alive", "finished")

_LINES = {
    "started": "is started again ({place})",
    "died": "has died ({exit}): {last_words}; started again in {pause_s:g} s, {restarts_left} "
    "restarts left",
    "given_up": "has died too often ({exit}) and is given up: {last_words}",
    "out_of_sync": "joins again: {reason}",
    "warning": "warns: {message}",
}


class Measurer:
    """Evaluates the workers' models from their files, in a thread of its own."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._folder = plan, plan.folder.path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="measuring")
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            self._engine = self._plan.job.build_engine()
        return self._engine

    async def of_round(self, rounds: int, workers: Sequence[int]) -> dict[str, Any]:
        """From checkpoints. Raises `CheckpointError` where one is not there (any more)."""

        def work() -> dict[str, Any]:
            name = f"round-{rounds:06d}/worker.safetensors"
            return self._evaluate(
                [read_vectors(worker_folder(self._folder, w) / name) for w in workers]
            )

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def of(self, vectors: Sequence[Vectors]) -> dict[str, Any]:
        """Loss of the averaged model, and how far the workers are apart."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._evaluate, vectors)

    def _evaluate(self, vectors: Sequence[Vectors]) -> dict[str, Any]:
        each = self._plan.recipe.measure.workers
        return measure_replicas(self.engine, vectors, each_worker=each)

    def finals(self, workers: Sequence[int]) -> list[Vectors]:
        """What the workers have left. Raises `RunFailed` where that is not here."""
        paths = [worker_folder(self._folder, w) / "final.safetensors" for w in workers]
        missing = [path for path in paths if not path.is_file()]
        if missing:
            raise RunFailed(
                f"the workers have finished, and {missing[0]} is not here: on several machines "
                f"--out must be a folder that all of them share"
            )
        return [read_vectors(path) for path in paths]

    def close(self) -> None:
        """Measure no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def reachable(address: str) -> str:
    """Where processes of this machine reach what listens at `address`."""
    host, port = split_address(address)
    return join_address("127.0.0.1", port) if is_wildcard(host) else address


def first_round(folder: Path, workers: int) -> tuple[str, int] | None:
    """Run id and completed rounds to go on from; None where no worker has a checkpoint."""
    from gossamer.cluster.checkpoint import WorkerCheckpoints
    from gossamer.cluster.seats import choose_round

    saved = [WorkerCheckpoints(worker_folder(folder, worker)) for worker in range(workers)]
    rounds = choose_round(checkpoints.rounds() for checkpoints in saved)
    run_ids = [run_id for s in saved if (run_id := s.saved_run_id()) is not None]
    return None if rounds is None or not run_ids else (run_ids[0], rounds)
