"""One syncer process: it gathers, merges and hands out until the workers have ended.

It is in no membership and passes no boundary. What it has merged is on its disk before anybody is
told; started again, it goes on from there. Nobody else has that state, so one that comes without it
waits, and the workers train on.
"""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from gossamer.cluster.certs import Credentials, place_name
from gossamer.cluster.checkpoint import SyncerCheckpoints
from gossamer.cluster.context import ClusterContext, Progress
from gossamer.cluster.control import Client
from gossamer.cluster.export import syncer_folder
from gossamer.cluster.job import Work
from gossamer.cluster.limits import Limits
from gossamer.cluster.messages import Entry, View
from gossamer.cluster.peers import Peers
from gossamer.cluster.results import write_results
from gossamer.cluster.transport import GrpcTransport
from gossamer.cluster.worker import SMALL_PAYLOAD_BYTES, Events
from gossamer.comm.context import MethodState
from gossamer.comm.donation import digest
from gossamer.comm.members import MemberLog
from gossamer.comm.state import state_tensors
from gossamer.errors import ConfigError, OutOfSync, RunFailed

TELL_EVERY_S = 1.0  # how often its totals are told, at most


def _silent(kind: str, fields: dict[str, Any]) -> None:
    """Nobody listens."""


class SyncerProcess:
    """A syncer from joining to the end.

    Args:
        job: what is run; must equal the coordinator's.
        coordinator: its address, HOST:PORT.
        folder: for checkpoints; "{run}" in it stands for the beginning of the run's id.
        index: which of the syncers, from 0.
        listen: where this process listens, HOST:PORT; port 0 takes a free one.
        advertise: the address that the others are told; by default the one listened on.
        credentials: this syncer's certificate; None on loopback only.
        rate, delay_s: a thin line to play, in bytes per second and seconds.
        events: hears of merges and losses.

    Raises `ConfigError` where the method has no such syncer.
    """

    def __init__(
        self,
        job: Work,
        *,
        coordinator: str,
        folder: Path,
        index: int = 0,
        listen: str = "127.0.0.1:0",
        advertise: str | None = None,
        credentials: Credentials | None = None,
        rate: float | None = None,
        delay_s: float = 0.0,
        events: Events = _silent,
    ) -> None:
        count = job.method.num_syncers
        if not 0 <= index < count:
            raise ConfigError(
                f"{job.method.name} has {count} syncers (from 0), there is no syncer {index}"
            )
        self.job, self.index, self._folder = job, index, folder
        self.place = job.training.workers + index
        self._coordinator, self._credentials = coordinator, credentials
        self._listen, self._advertise = listen, advertise
        self._rate, self._delay_s, self._events = rate, delay_s, events
        self._engine = job.build_engine()
        _, (self._replica,) = self._engine.new_replicas(1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self.progress = Progress()
        self._view: View | None = None
        self._changed = asyncio.Event()
        self._out_of_sync: OutOfSync | None = None
        self._told_s = -math.inf
        self.stopped = False
        self.root: Path | None = None

    # ------------------------------------------------------------------------------ start and end

    async def run(self) -> dict[str, Any]:
        """Take part until the workers have ended; the syncer's summary.

        Raises `ConfigError` where the run refuses this process, `OSError` where the disk is full,
        `CheckpointError` where its files are damaged, and `CommError` where nothing can be done.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self._thread.shutdown, wait=False, cancel_futures=True)
            self._client = Client(self._coordinator, credentials=self._credentials)
            stack.push_async_callback(self._client.close)
            await self._open()
            stack.push_async_callback(self._transport.close, 0.0)
            await self._join()
            return await self._live()

    def stop(self) -> None:
        """End soon."""
        self.stopped = True

    async def _open(self) -> None:
        """Find out which run this is, and listen."""
        status = await self._client.status()
        vector_bytes = self._replica.parameters.nbytes
        self._transport = GrpcTransport(
            self.place, status.run_id, listen=self._listen, credentials=self._credentials,
            rate=self._rate, delay_s=self._delay_s, num_workers=self.job.training.workers,
            limits=Limits.for_payload(
                max(vector_bytes, SMALL_PAYLOAD_BYTES), keepalive_s=self.job.keepalive_s
            ),
        )  # fmt: skip
        self._peers = Peers(
            self.place, self._transport, lambda lost: self._events("lost", {"worker": lost})
        )
        self._address = await self._transport.start()
        named = Path(str(self._folder).replace("{run}", status.run_id[:8]))
        self.root = syncer_folder(named, self.index)
        self._checkpoints = SyncerCheckpoints(self.root, status.run_id)

    async def _join(self) -> None:
        """Ask the coordinator for the place."""
        saved = self._checkpoints
        reply = await self._client.join(
            address=self._advertise or self._address,
            configuration=self.job.configuration,
            worker=self.place,
            role="syncer",
            run_id=saved.saved_run_id(),
            checkpoint_rounds=saved.numbers(),
        )
        self._incarnation, self._report_every_s = reply.incarnation, reply.report_every_s
        for warning in reply.warnings:
            self._events("warning", {"message": warning})
        self._apply(reply.view)

    async def _live(self) -> dict[str, Any]:
        main = asyncio.create_task(self._take_part(), name="main")
        tasks = [
            main,
            asyncio.create_task(self._watch(), name="watch"),
            asyncio.create_task(self._report(), name="report"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {main}:
                task.result()  # what ended the background ends the syncer
            summary = main.result()
            with suppress(OutOfSync):
                await self._client.leave("finished", "the workers have ended")
            return summary
        except asyncio.CancelledError:
            await self._client.leave("stopped", "stopped by its user")
            raise
        except BaseException as error:  # a full disk, a damaged checkpoint
            with suppress(OutOfSync):
                await self._client.leave("error", str(error) or type(error).__name__)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --------------------------------------------------------------------------------- coordinator

    def _apply(self, view: View) -> None:
        if self._view is not None and view.revision < self._view.revision:
            return
        self._view = view
        self._peers.apply(view)
        self._transport.mailbox.tell()
        self._changed.set()

    def _newest_view(self) -> View:
        assert self._view is not None
        return self._view

    async def _watch(self) -> None:
        while True:
            incarnation = self._incarnation
            try:
                async for view in self._client.watch(lambda: (-1, 0)):
                    self._apply(view)
            except OutOfSync as error:
                await self._given_up(error, incarnation)

    async def _report(self) -> None:
        """Show that it lives: a syncer that waits for letters makes progress by listening."""
        progress = self.progress
        while True:
            await asyncio.sleep(self._report_every_s)
            progress.counter += progress.waits > 0
            incarnation = self._incarnation
            try:
                await self._client.report(
                    round_started=-1,
                    rounds_completed=0,
                    progress=progress.counter,
                    bytes_sent=progress.ledger.total(),
                )
            except OutOfSync as error:
                await self._given_up(error, incarnation)

    async def _given_up(self, error: OutOfSync, incarnation: int) -> None:
        """The others go on without this syncer: it joins again, with what it has saved."""
        if self._out_of_sync is None and incarnation == self._incarnation:
            self._out_of_sync = error
            self._changed.set()
        await asyncio.sleep(self._report_every_s)

    # --------------------------------------------------------------------------------------- life

    async def _take_part(self) -> dict[str, Any]:
        while True:
            try:
                state = await self._enter()
                if state is not None:
                    await self._run_method(state)
            except OutOfSync as error:
                self._events("out_of_sync", {"reason": str(error)})
                # Not later: once it has its place again, letters are for what it does then.
                self._transport.begin_letters()
                await self._join()
                self._out_of_sync = None
                continue
            return self._finish(state)

    async def _entry(self) -> Entry:
        """What the coordinator has decided for this process, once it has."""
        while True:
            self._changed.clear()
            if self._out_of_sync is not None:
                raise self._out_of_sync
            entry = self._newest_view().entry(self.place)
            if (
                entry is not None
                and entry.start != "wait"
                and entry.incarnation == self._incarnation
            ):
                return entry
            await self._changed.wait()

    async def _enter(self) -> MethodState | None:
        """The state to go on with; None where the run is over."""
        entry = await self._entry()
        if entry.start == "over":
            return None
        self.progress.begin()
        state = self.job.method.init_syncer(self._replica, self.job.training.workers)
        if entry.start == "checkpoint":
            state = self._checkpoints.load(state)
            self._events("back", {"merge": entry.round, "digest": _digest(state)})
            return state
        self._checkpoints.forget()
        await self._save(state)  # so that there is one to come back with
        return state

    async def _run_method(self, state: MethodState) -> None:
        """Until the workers have ended. Raises `OutOfSync` where this syncer was given up."""
        work = self.job.method.run_syncer(self._new_context(), state)
        method = asyncio.create_task(work, name="method")
        try:
            while not method.done():
                self._changed.clear()
                if self._out_of_sync is not None:
                    raise self._out_of_sync
                if self._newest_view().phase == "ended":
                    return
                news = asyncio.create_task(self._changed.wait())
                await asyncio.wait([method, news], return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            method.result()
            raise RunFailed(f"the syncer of {self.job.method.name} has ended by itself")
        finally:
            method.cancel()
            await asyncio.wait([method])

    def _new_context(self) -> SyncerContext:
        job = self.job
        return SyncerContext(
            worker=self.place,
            num_workers=job.training.workers,
            num_rounds=job.training.rounds,
            seed=job.seed,
            deadline_s=job.deadline_s,
            engine=self._engine,
            replica=self._replica,
            transport=self._transport,
            members=self._log,
            boundary=self._merged,
            thread=self._thread,
            progress=self.progress,
            num_syncers=job.method.num_syncers,
            connected=lambda: self._newest_view().running_workers(),
        )

    def _log(self) -> MemberLog:
        return self._newest_view().log.member_log()

    async def _save(self, state: MethodState) -> int:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._checkpoints.save, state)

    async def _merged(self, ctx: ClusterContext, state: MethodState) -> None:
        """Make durable what was merged, before anybody is told."""
        number = await self._save(state)
        self.progress.counter += 1
        if time.monotonic() - self._told_s >= TELL_EVERY_S:
            self._told_s = time.monotonic()
            told = {"merge": number, "digest": _digest(state), **self.totals()}
            self._events("merged", told)

    def totals(self) -> dict[str, Any]:
        """What adds up; a syncer's time is nobody's training."""
        return {
            **self.progress.totals(), "time_s": 0.0, "train_time_s": 0.0, "blocked_time_s": 0.0,
        }  # fmt: skip

    def _finish(self, state: MethodState | None) -> dict[str, Any]:
        """Its figures, written to its folder."""
        summary = {
            "schema_version": 1,
            "syncer": self.index,
            "run_id": self._newest_view().run_id,
            "method": self.job.method.name,
            "merges": max(self._checkpoints.numbers(), default=0),
            "digest": None if state is None else _digest(state),
            **self.totals(),
        }
        assert self.root is not None
        write_results(self.root, summary, None)
        return summary

    @property
    def name(self) -> str:
        """As its certificate has it."""
        return place_name(self.place, self.job.training.workers)


class SyncerContext(ClusterContext):
    """A syncer's narrow waist: it is in no round, and its checkpoints are its own."""

    async def checkpoint(self, state: MethodState) -> None:
        await self._boundary(self, state)

    async def mail(self, seen: int, timeout: float | None = None) -> int:
        self.progress.waits += 1  # all that it waits for comes by letter
        try:
            return await self._transport.mail(seen, timeout)
        finally:
            self.progress.waits -= 1


def _digest(state: MethodState) -> str | None:
    return digest(list(state_tensors(state).values()))
