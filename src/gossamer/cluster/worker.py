"""One worker process: it joins a run, gets a state, runs the method, and comes back if it must."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from gossamer.cluster.certs import Credentials
from gossamer.cluster.checkpoint import WorkerCheckpoints
from gossamer.cluster.context import ClusterContext, Progress, Stopped, Trains
from gossamer.cluster.control import Client
from gossamer.cluster.donor import Donor, join_tag
from gossamer.cluster.job import Work
from gossamer.cluster.limits import Limits
from gossamer.cluster.messages import Entry, View
from gossamer.cluster.peers import Peers
from gossamer.cluster.results import write_results
from gossamer.cluster.transport import GrpcTransport
from gossamer.comm.context import MethodState
from gossamer.comm.donation import accept, digest, share_start
from gossamer.comm.state import shared_tensors
from gossamer.errors import ConfigError, OutOfSync, PayloadCorrupt, PeerLost
from gossamer.training.replica import Replica

Events = Callable[[str, dict[str, Any]], None]
SMALL_PAYLOAD_BYTES = 64 * 2**20  # predictions, buffers and reports are below this
CLOSE_GRACE_S = 2.0
REPORT_PAUSE_S = 0.05  # the least time between two reports
PROGRESS_BYTES = 1 << 16  # that move are progress, in a transfer that takes longer than a lease


def _nothing() -> None:
    """Done when the training thread is free."""


def _silent(kind: str, fields: dict[str, Any]) -> None:
    """Nobody listens."""


class WorkerProcess:
    """A worker from joining to the end.

    Args:
        job: what is run; must equal the coordinator's.
        coordinator: its address, HOST:PORT.
        listen: where this worker listens, HOST:PORT; port 0 takes a free one.
        advertise: the address that the others are told; by default the one listened on.
        credentials: this worker's certificate; None on loopback only.
        folder: for checkpoints and results; None: none are written. "{run}" in it stands for the
            beginning of the run's id.
        worker: the index wanted; None: a free one.
        rate, delay_s: a thin line to play, in bytes per second and seconds.
        events: hears of rounds, joins and losses.
        digests: tell a digest of the state with each of them.
    """

    def __init__(
        self,
        job: Work,
        *,
        coordinator: str,
        listen: str = "127.0.0.1:0",
        advertise: str | None = None,
        credentials: Credentials | None = None,
        folder: Path | None = None,
        worker: int | None = None,
        rate: float | None = None,
        delay_s: float = 0.0,
        events: Events = _silent,
        digests: bool = True,
    ) -> None:
        self.job, self._listen, self._advertise = job, listen, advertise
        self._credentials, self._folder, self._wanted = credentials, folder, worker
        self._rate, self._delay_s, self._events = rate, delay_s, events
        self._coordinator, self._digests = coordinator, digests
        self._engine: Trains = job.build_engine()
        _, (self._replica,) = self._engine.new_replicas(1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training")
        self.progress = Progress()
        self._view: View | None = None
        self._changed = asyncio.Event()
        self.root: Path | None = None
        self._checkpoints: WorkerCheckpoints | None = None
        self._ctx: ClusterContext | None = None
        self._method: asyncio.Task[None] | None = None
        self._out_of_sync: OutOfSync | None = None
        self._took_donation = False
        self.stopped = False

    # ------------------------------------------------------------------------------ start and end

    async def run(self) -> dict[str, Any]:
        """Take part until the last round; the worker's summary.

        Raises `ConfigError` where the run refuses this process, `NonFiniteError` where training
        diverged here, `OSError` where the disk is full, and `CommError` where nothing can be done.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self._thread.shutdown, wait=False, cancel_futures=True)
            self._client = Client(self._coordinator, credentials=self._credentials)
            stack.push_async_callback(self._client.close)
            await self._open_transport()
            stack.push_async_callback(self._close_transport)
            await self._join()
            return await self._live()

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
                task.result()  # what ended the background ends the worker
            summary = main.result()
            with suppress(OutOfSync):  # given up at the very end: the work is done all the same
                await self._client.leave("finished", "did the last round")
            return summary
        except asyncio.CancelledError:
            main.cancel()
            await asyncio.wait([main])  # with its end the method's transfers are given up
            await self._client.leave("stopped", "stopped by its user")
            raise
        except BaseException as error:  # training that diverged, a full disk, the user's own code
            with suppress(OutOfSync):
                await self._client.leave("error", str(error) or type(error).__name__)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def stop(self) -> None:
        """End soon: training ends after the step that it is in, and nothing more is sent."""
        self.stopped = True
        if self._ctx is not None:
            self._ctx.stopping = True

    async def _close_transport(self) -> None:
        if self._ctx is not None:
            self._ctx.stopping = True
        self._donor.cancel()
        await self._transport.close(0.0 if self.stopped else CLOSE_GRACE_S)

    async def _open_transport(self) -> None:
        """Find out which run this is, and listen."""
        status = await self._client.status()
        taken = {w.worker for w in status.workers if w.alive}
        free = [w for w in range(self.job.training.workers) if w not in taken]
        worker = self._wanted if self._wanted is not None else (free[0] if free else 0)
        self.worker, self.run_id = worker, status.run_id
        self._replica.worker = worker
        self._transport = GrpcTransport(
            worker, status.run_id, listen=self._listen, credentials=self._credentials,
            rate=self._rate, delay_s=self._delay_s, limits=self._limits(),
            num_workers=self.job.training.workers,
        )  # fmt: skip
        self._peers = Peers(
            worker, self._transport, lambda lost: self._events("lost", {"worker": lost})
        )
        self._address = await self._transport.start()
        if self._folder is not None:
            named = str(self._folder).replace("{run}", status.run_id[:8])
            self.root = Path(named) / f"worker-{worker:03d}"
            self._checkpoints = WorkerCheckpoints(self.root)
        self._donor = Donor(
            worker, self.job.moments, self._reassign, thread=self._thread, folder=self.root
        )

    def _limits(self) -> Limits:
        """What the others may send: one vector of the model at a time, or what is small anyway."""
        parameters = self._replica.parameters
        vector_bytes = parameters.numel() * parameters.element_size()
        return Limits.for_payload(
            max(vector_bytes, SMALL_PAYLOAD_BYTES), keepalive_s=self.job.keepalive_s
        )

    async def _join(self) -> None:
        """Ask the coordinator for a place."""
        saved = self._checkpoints
        reply = await self._client.join(
            address=self._advertise or self._address,
            configuration=self.job.configuration,
            worker=self.worker,
            run_id=saved.saved_run_id() if saved is not None else None,
            checkpoint_rounds=saved.rounds() if saved is not None else (),
        )
        self.incarnation, self._report_every_s = reply.incarnation, reply.report_every_s
        if saved is not None:
            saved.run_id = reply.view.run_id
        for warning in reply.warnings:
            self._events("warning", {"message": warning})
        self._apply(reply.view)

    # --------------------------------------------------------------------------------- coordinator

    def _apply(self, view: View) -> None:
        """Take over a newer view of the others."""
        if self._view is not None and view.revision < self._view.revision:
            return
        self._view = view
        self._peers.apply(view)
        self._log = view.log.member_log()
        if self._ctx is not None:
            changed = PeerLost("the members of the round have changed")
            self._transport.forsake(self._ctx.is_forsaken, changed)
        self._donor.at_news(view)
        self._transport.mailbox.tell()
        self._changed.set()

    def _newest_view(self) -> View:
        assert self._view is not None
        return self._view

    async def _watch(self) -> None:
        def position() -> tuple[int, int]:
            return self.progress.round_started, self.progress.rounds_completed

        while True:
            incarnation = self.incarnation
            try:
                async for view in self._client.watch(position):
                    self._apply(view)
            except OutOfSync as error:
                await self._given_up(error, incarnation)

    async def _report(self) -> None:
        """Say how far this worker is: at each boundary, as changes take effect by round, and often
        enough between them to show that it lives.
        """
        progress = self.progress
        while True:
            await asyncio.sleep(REPORT_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._report_every_s):
                    await progress.at_boundary.wait()
            progress.at_boundary.clear()
            loss, incarnation = progress.loss, self.incarnation
            moved = self._transport.traffic.bytes_sent + self._transport.traffic.bytes_received
            try:
                await self._client.report(
                    round_started=progress.round_started,
                    rounds_completed=progress.rounds_completed,
                    progress=progress.counter + moved // PROGRESS_BYTES,
                    waiting=progress.waits > 0,
                    loss=loss if loss is not None and loss - loss == 0 else None,
                    utilization=progress.utilization(),
                    blocked_s=max(0.0, progress.elapsed_s() - progress.train_s),
                    bytes_sent=progress.ledger.total(),
                )
            except OutOfSync as error:
                await self._given_up(error, incarnation)

    async def _given_up(self, error: OutOfSync, incarnation: int) -> None:
        """The others go on without this worker: end the method, which then joins again."""
        if self._out_of_sync is None and incarnation == self.incarnation:
            self._out_of_sync = error
            self._changed.set()
            if self._ctx is not None:
                self._ctx.stopping = True
            if self._method is not None:
                self._method.cancel()
        await asyncio.sleep(self._report_every_s)

    # --------------------------------------------------------------------------------------- life

    async def _take_part(self) -> dict[str, Any]:
        while True:
            try:
                state = await self._enter()
                if state is not None:
                    self.progress.begin()
                    await self._run_method(state)
                    await self._hand_over()
            except OutOfSync as error:
                self._events("out_of_sync", {"reason": str(error)})
                await self._join_again(error)
                continue
            return self._finish(state)

    async def _join_again(self, error: OutOfSync) -> None:
        """Take a new place, and leave the old one where it is still held."""
        if self._out_of_sync is None:
            with suppress(OutOfSync):
                await self._client.leave("out_of_sync", str(error), timeout_s=math.inf)
        await self._join()
        self._out_of_sync = None

    async def _hand_over(self) -> None:
        """What others still need of this worker arrives before it says that it has finished."""
        await self._donor.finish()
        await self._transport.settled()

    async def _run_method(self, state: MethodState) -> None:
        """Until the last round. Raises `OutOfSync` where the others have given this worker up."""
        ctx = self._ctx
        assert ctx is not None
        self._method = asyncio.create_task(self.job.method.run(ctx, state), name="method")
        try:
            await self._method
        except (asyncio.CancelledError, Stopped):
            if self._out_of_sync is None or self.stopped:
                raise asyncio.CancelledError from None
            raise self._out_of_sync from None
        finally:
            self._method = None

    async def _enter(self) -> MethodState | None:
        """Get a state as the coordinator decides; None where the run is over."""
        # A method that was cancelled may still be in a step, which would write to the parameters.
        await asyncio.get_running_loop().run_in_executor(self._thread, _nothing)
        self._ctx = self._new_context()
        self._transport.begin_letters()
        self._donor.begin()
        while True:
            entry = await self._entry()
            blank = self.job.method.init(self._replica)
            if entry.start == "over":
                return None
            if entry.start == "seed":
                untouched = self.progress.began_s is None and not self._took_donation
                blank = blank if untouched else self._start_afresh()
                if self.job.starts_differ:
                    await share_start(self._ctx, self._log.of_round(0).workers)
                    blank = self.job.method.init(self._replica)
                return blank
            if entry.start == "checkpoint":
                if self._checkpoints is None:
                    raise ConfigError("the run goes on from checkpoints, and this worker has none")
                return self._checkpoints.load(entry.round, self._replica, blank)
            state = await self._take_donation(entry, blank)
            if state is not None:
                return state

    def _start_afresh(self) -> MethodState:
        """The state before the first round; for a run that begins again before any was done."""
        self._engine = self.job.build_engine()
        _, (self._replica,) = self._engine.new_replicas(1)
        self._replica.worker = self.worker
        self._ctx = self._new_context()
        return self.job.method.init(self._replica)

    async def _entry(self) -> Entry:
        """What the coordinator has decided for this process, once it has."""
        while True:
            self._changed.clear()
            if self._out_of_sync is not None:
                raise self._out_of_sync
            view = self._view
            entry = view.entry(self.worker) if view is not None else None
            decided = entry is not None and entry.start != "wait"
            if entry is not None and decided and entry.incarnation == self.incarnation:
                return entry
            await self._changed.wait()

    async def _take_donation(self, entry: Entry, blank: MethodState) -> MethodState | None:
        assert self._ctx is not None and entry.donor is not None
        started = time.monotonic()
        self._took_donation = True  # perhaps in part
        tag = join_tag(entry)
        # The donor may be in the middle of a long round; if it is lost or cannot, there is news.
        work = accept(self._ctx, entry.donor, tag, blank, self.job.moments, patience_s=math.inf)
        try:
            state = await self._while_it_holds(entry, work)
            reason = f"the state of worker {entry.donor} did not come"
        except PayloadCorrupt as error:
            state, reason = None, str(error)
        if not self._holds(entry):
            return None
        if state is None:
            await self._reassign(entry, reason)
            return None
        if self.job.moments == "keep" and self._checkpoints is not None:
            self._checkpoints.load_moments(self._replica)
        self._events(
            "joined",
            {
                "donor": entry.donor,
                "round": entry.round,
                "seconds": time.monotonic() - started,
                "digest": self.state_digest(state),
            },
        )
        return state

    async def _reassign(self, entry: Entry, reason: str) -> None:
        """A state does not get to a joiner: it needs another donor."""
        self._apply(await self._client.reassign(entry.worker, entry.attempt, reason))

    def _holds(self, entry: Entry) -> bool:
        """Whether this is still what the coordinator has decided."""
        assert self._view is not None
        return self._out_of_sync is None and self._view.entry(self.worker) == entry

    async def _while_it_holds(
        self, entry: Entry, work: Coroutine[Any, Any, MethodState | None]
    ) -> MethodState | None:
        """The result of `work`; None where the coordinator has decided otherwise meanwhile."""
        task = asyncio.create_task(work, name="accept")
        try:
            while not task.done() and self._holds(entry):
                self._changed.clear()
                news = asyncio.create_task(self._changed.wait())
                await asyncio.wait([task, news], return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
            return task.result() if task.done() else None
        finally:
            task.cancel()
            await asyncio.wait([task])

    def state_digest(self, state: MethodState) -> str | None:
        """Of parameters and method state; equal on workers that must agree."""
        return digest([self._replica.parameters, *shared_tensors(state).values()])

    def _new_context(self) -> ClusterContext:
        job = self.job
        return ClusterContext(
            worker=self.worker,
            num_workers=job.training.workers,
            num_rounds=job.training.rounds,
            seed=job.seed,
            deadline_s=job.deadline_s,
            engine=self._engine,
            replica=self._replica,
            transport=self._transport,
            members=lambda: self._log,
            boundary=self._boundary,
            thread=self._thread,
            progress=self.progress,
            step_time_s=job.step_time_s,
            num_syncers=job.method.num_syncers,
            connected=lambda: self._newest_view().running_workers(),
        )

    # --------------------------------------------------------------------------------- boundaries

    async def _boundary(self, ctx: ClusterContext, state: MethodState) -> None:
        """Between two rounds: give state to joiners, save, tell."""
        if self._out_of_sync is not None:
            raise self._out_of_sync
        if self._log.is_gone(self.worker):
            raise OutOfSync(f"worker {self.worker} was given up by the others")
        await self._donor.at_boundary(ctx, state, self._newest_view)
        index = state.rounds_completed
        every = self.job.checkpoint_every
        if self._checkpoints is not None and index and every and index % every == 0:
            checkpoints = self._checkpoints
            replica: Replica = self._replica
            await asyncio.get_running_loop().run_in_executor(
                self._thread, checkpoints.save, replica, state
            )
        progress = self.progress
        self._events(
            "boundary",
            {
                "round": index,
                "loss": progress.loss,
                "utilization": progress.utilization(),
                "digest": self.state_digest(state) if self._digests else None,
                **progress.totals(),
            },
        )

    def _finish(self, state: MethodState | None) -> dict[str, Any]:
        """The worker's results, written to its folder."""
        progress = self.progress
        summary = {
            "schema_version": 1,
            "worker": self.worker,
            "run_id": self.run_id,
            "method": self.job.method.name,
            "rounds_completed": progress.rounds_completed,
            "train_loss": progress.loss,
            "utilization": progress.utilization(),
            **progress.totals(),
            "digest": None if state is None else self.state_digest(state),
        }
        if self.root is not None:
            # One who came too late has no parameters worth keeping.
            write_results(self.root, summary, self._replica if state is not None else None)
        return summary
