"""The coordinator over real sockets on this machine; its clock is moved by hand where time counts.

Nothing here sleeps to guess: every wait is for an event, within a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import pytest

from gossamer.cluster import certs
from gossamer.cluster.certs import Credentials
from gossamer.cluster.control import SERVICE, Client, JoinRefused
from gossamer.cluster.coordinator import Coordinator, serve
from gossamer.cluster.messages import JoinReply, Refusal, StatusRequest, View, decode, encode
from gossamer.cluster.plan import CoordinatorSettings
from gossamer.errors import ConfigError, OutOfSync

T = TypeVar("T")
RECIPE = {"seed": 0, "method": {"name": "diloco", "inner_steps": 10}}
BOUND_S = 20.0


def run(test: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(test, BOUND_S))


class ManualClock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self._now = 100.0
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self._now + seconds, future))
        await future

    async def advance(self, seconds: float) -> None:
        """Let time pass in small steps, each seen by whoever sleeps."""
        end = self._now + seconds
        while self._now < end:
            self._now = min(end, self._now + 0.25)
            for due, future in self._sleepers:
                if due <= self._now and not future.done():
                    future.set_result(None)
            self._sleepers = [s for s in self._sleepers if not s[1].done()]
            for _ in range(3):
                await asyncio.sleep(0)


class Worker:
    """A process as the coordinator sees it: a listening socket and a client."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self.client = Client(address, credentials=credentials)
        self.position = (-1, 0)
        self.progress = 0
        self.views: list[View] = []
        self.ending: BaseException | None = None
        self._news = asyncio.Condition()
        self._watching: asyncio.Task[None] | None = None
        self._socket: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def listen(self) -> str:
        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        self._socket = await asyncio.start_server(accept, "127.0.0.1", 0)
        return f"127.0.0.1:{self._socket.sockets[0].getsockname()[1]}"

    async def join(self, **given: Any) -> JoinReply:
        address = await self.listen() if self._socket is None else self._address()
        given = {"address": address, "configuration": RECIPE, **given}
        reply = await self.client.join(**given)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        return reply

    def _address(self) -> str:
        assert self._socket is not None
        return f"127.0.0.1:{self._socket.sockets[0].getsockname()[1]}"

    async def _watch(self) -> None:
        try:
            async for view in self.client.watch(lambda: self.position):
                async with self._news:
                    self.views.append(view)
                    self._news.notify_all()
        except (OutOfSync, ConfigError) as error:
            async with self._news:
                self.ending = error
                self._news.notify_all()

    async def sees(self, what: Callable[[View], Any]) -> View:
        """Wait for a view of which `what` holds."""
        async with self._news:
            await self._news.wait_for(lambda: self.views and what(self.views[-1]))
            return self.views[-1]

    async def is_told_to_go(self) -> BaseException:
        async with self._news:
            await self._news.wait_for(lambda: self.ending is not None)
        assert self.ending is not None
        return self.ending

    async def report(self, started: int, completed: int, **given: Any) -> bool:
        self.position = (started, completed)
        self.progress += given.pop("advance", 1)
        return await self.client.report(
            round_started=started, rounds_completed=completed, progress=self.progress, **given
        )

    async def die(self) -> None:
        """As `kill -9` leaves it: no goodbye, nobody listens."""
        if self._socket is not None:
            self._socket.close()
            await self._socket.wait_closed()
            self._socket = None
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self.client.close()


def settings(folder: Path, **given: Any) -> CoordinatorSettings:
    return CoordinatorSettings(
        **{
            "store": folder / "run.sqlite",
            "workers": 3,
            "rounds": 50,
            "deadline": 8.0,
            "configuration": RECIPE,
            **given,
        }
    )


@contextlib.asynccontextmanager
async def running(
    folder: Path, credentials: Credentials | None = None, clock: ManualClock | None = None,
    **given: Any,
) -> AsyncIterator[tuple[Coordinator, str]]:  # fmt: skip
    coordinator = Coordinator(settings(folder, **given), credentials=credentials, clock=clock)
    address = await coordinator.start()
    try:
        yield coordinator, address
    finally:
        await coordinator.close(0.1)


@contextlib.asynccontextmanager
async def workers(address: str, number: int, **given: Any) -> AsyncIterator[list[Worker]]:
    """Some that have joined and see the run begin."""
    fleet = [Worker(address) for _ in range(number)]
    try:
        for index, worker in enumerate(fleet):
            await worker.join(worker=index, **given)
        for worker in fleet:
            await worker.sees(lambda view: view.phase == "running")
        yield fleet
    finally:
        for worker in fleet:
            await worker.die()


def is_lost(worker: int) -> Callable[[View], bool]:
    return lambda view: view.log.member_log().is_gone(worker)


def test_three_join_and_begin_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (coordinator, address):
            fleet = [Worker(address) for _ in range(3)]
            replies = [await worker.join() for worker in fleet]
            assert [reply.worker for reply in replies] == [0, 1, 2]
            assert [len(reply.view.peers) for reply in replies] == [1, 2, 3]
            for index, worker in enumerate(fleet):
                view = await worker.sees(lambda view: view.phase == "running")
                entry = view.entry(index)
                assert entry is not None and (entry.start, entry.round) == ("seed", 0)
                assert view.log.member_log().planned(0).workers == (0, 1, 2)
                assert view.log.member_log().planned(0).epoch == 0
            assert await fleet[0].report(0, 0, loss=2.5, utilization=0.5, bytes_sent=7)
            status = await fleet[1].client.status()
            assert (status.phase, status.round, status.members) == ("running", 0, (0, 1, 2))
            first = status.workers[0]
            assert (first.loss, first.utilization, first.bytes_sent) == (2.5, 0.5, 7)
            assert [worker.phase for worker in status.workers] == ["running"] * 3
            for worker in fleet:
                assert await worker.client.leave("finished", "all rounds done")
                await worker.die()
            await coordinator.ended.wait()

    run(scenario())


def test_a_death_is_pushed_at_once(tmp_path: Path) -> None:
    """The clock stands still: no lease has a part in it."""

    async def scenario() -> None:
        clock = ManualClock()
        async with running(tmp_path, clock=clock) as (_, address), workers(address, 3) as fleet:
            for worker in fleet:
                await worker.report(4, 4)
            await fleet[1].die()
            for worker in (fleet[0], fleet[2]):
                view = await worker.sees(is_lost(1))
                assert view.log.member_log().present(4).workers == (0, 2)
                assert view.log.member_log().planned(5).workers == (0, 1, 2)
                assert view.log.member_log().planned(6).workers == (0, 2)
                assert view.losses[-1].cause == "crash"

    run(scenario())


def test_a_hung_worker_with_a_live_connection_is_out_after_the_deadline(tmp_path: Path) -> None:
    """Its event loop answers and reports; its training does nothing."""

    async def scenario() -> None:
        clock = ManualClock()
        async with running(tmp_path, clock=clock) as (_, address), workers(address, 3) as fleet:
            for _ in range(8):
                await clock.advance(0.9)
                await fleet[0].report(0, 0)
                await fleet[1].report(0, 0)
                await fleet[2].report(0, 0, advance=0)
            assert not any(is_lost(2)(worker.views[-1]) for worker in fleet)
            await clock.advance(2.0)
            view = await fleet[0].sees(is_lost(2))
            assert (view.losses[-1].cause, view.losses[-1].worker) == ("hang", 2)
            assert "given up: no progress for 8 s" in str(await fleet[2].is_told_to_go())
            with pytest.raises(OutOfSync, match="no progress"):
                await fleet[2].report(0, 0)

    run(scenario())


def test_a_coordinator_that_hears_nobody_gives_nobody_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with running(tmp_path, clock=clock) as (_, address), workers(address, 3) as fleet:
            await clock.advance(60.0)
            for worker in fleet:
                assert await worker.report(9, 9)
            await clock.advance(3.0)
            status = await fleet[0].client.status()
            assert [worker.phase for worker in status.workers] == ["running"] * 3

    run(scenario())


def test_workers_attach_again_to_a_restarted_coordinator(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = Coordinator(settings(tmp_path))
        address = await first.start()
        async with workers(address, 3) as fleet:
            await fleet[0].report(3, 3)
            run_id = fleet[0].views[-1].run_id
            await first.close(0.1)
            assert not await fleet[0].report(7, 7)  # quietly: it trains on
            await fleet[2].die()
            revision = fleet[0].views[-1].revision
            async with running(tmp_path, clock=(clock := ManualClock()), listen=address) as (
                second, _,
            ):  # fmt: skip
                for worker in fleet[:2]:
                    view = await worker.sees(lambda view: view.revision > revision)
                    assert view.run_id == run_id
                    # Worker 2 is not heard of yet, so nothing is decided.
                    assert view.log.member_log().planned(9).workers == (0, 1, 2)
                await clock.advance(4.0)
                view = await fleet[1].sees(is_lost(2))
                assert second.membership.log.newest_started == 7  # told when it attached
                assert view.log.member_log().planned(8).workers == (0, 1, 2)
                assert view.log.member_log().planned(9).workers == (0, 1)
                again = Worker(address)
                reply = await again.join()
                assert (reply.worker, reply.incarnation) == (2, 2)
                view = await again.sees(lambda view: view.entry(2).start == "donor")
                assert view.entry(2).round == 9 and view.entry(2).donor in (0, 1)
                await again.die()

    run(scenario())


def test_another_configuration_is_refused_with_the_difference_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, address):
            worker = Worker(address)
            other = {"seed": 0, "method": {"name": "diloco", "inner_steps": 20}}
            with pytest.raises(JoinRefused, match=r"method\.inner_steps was 10 and is now 20"):
                await worker.join(configuration=other)
            assert worker.client.calls["Join"] == 1  # and no second try
            with pytest.raises(JoinRefused, match="belongs to run 0123"):
                await worker.join(run_id="0123456789abcdef" * 2, checkpoint_rounds=[3])
            await worker.die()

    run(scenario())


def test_the_address_must_lead_to_the_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, address):
            worker = Worker(address)
            here = await worker.listen()
            anywhere = here.replace("127.0.0.1", "0.0.0.0")
            with pytest.raises(JoinRefused, match=r"nobody can connect to 0\.0\.0\.0.*--advertise"):
                await worker.client.join(address=anywhere, configuration=RECIPE)
            assert worker._socket is not None
            worker._socket.close()
            await worker._socket.wait_closed()
            for given in (here, "0.0.0.0:5000", "[::]:5000", "nowhere", "127.0.0.1:0"):
                with pytest.raises(JoinRefused) as caught:
                    await worker.client.join(address=given, configuration=RECIPE)
                assert caught.value.code == "address"
            await worker.client.close()

    run(scenario())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    certs.issue(folder, 2)
    return folder


def test_certificates_say_who_is_who(tmp_path: Path, folder: Path) -> None:
    async def scenario() -> None:
        coordinator = Credentials.load(folder, "coordinator")
        async with running(tmp_path, credentials=coordinator, listen="0.0.0.0:0") as (_, bound):
            address = bound.replace("0.0.0.0", "127.0.0.1")
            one = Worker(address, Credentials.load(folder, "worker-1"))
            with pytest.raises(JoinRefused, match="not that of worker 0"):
                await one.join(worker=0)
            reply = await one.join()
            assert reply.worker == 1
            assert len(reply.warnings) == 1 and "--advertise" in reply.warnings[0]
            zero = Worker(address, Credentials.load(folder, "worker-0"))
            zero.client.me = reply  # it pretends
            with pytest.raises(JoinRefused, match="not that of worker 1"):
                await zero.report(0, 0)
            await zero.die()
            await one.die()

    run(scenario())


def test_connections_that_cannot_come_about_end_at_once(tmp_path: Path, folder: Path) -> None:
    async def scenario() -> None:
        certs.issue(tmp_path / "other", 1)
        stranger = Credentials.load(tmp_path / "other", "worker-0")
        mine = Credentials.load(folder, "worker-0")
        mixed = Credentials(
            mine.name, mine.ca, stranger.certificate, stranger.key, expires=mine.expires
        )
        coordinator = Credentials.load(folder, "coordinator")
        async with running(tmp_path, credentials=coordinator) as (_, secure):
            for credentials, why in [
                (stranger, "not trusted"),  # it does not trust the coordinator
                (mixed, "refuses this certificate"),
                (None, "speaks TLS only"),
            ]:
                client = Client(secure, credentials=credentials)
                with pytest.raises(ConfigError, match=why):
                    await client.status()
                assert client.calls["Status"] == 1
                await client.close()
        async with running(tmp_path / "plain") as (_, plain):
            client = Client(plain, credentials=mine)
            with pytest.raises(ConfigError, match="does not speak TLS"):
                await client.status()
            await client.close()

    run(scenario())


def test_plain_text_stays_on_this_machine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs certificates"):
        Coordinator(settings(tmp_path, listen="0.0.0.0:0"))
    with pytest.raises(ConfigError, match="certificates are needed"):
        Client("10.1.2.3:7000")


def test_an_index_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, address), workers(address, 3) as fleet:
            second = Worker(address)
            with pytest.raises(JoinRefused, match="worker 1 takes part already"):
                await second.join(worker=1, patience_s=0.2)
            with pytest.raises(JoinRefused, match="all 3 places for a worker are taken"):
                await second.join(patience_s=0.0)
            joining = asyncio.create_task(second.join(worker=1))
            await fleet[1].die()
            reply = await joining
            assert reply.incarnation == 2
            view = await second.sees(lambda view: view.entry(1).start == "donor")
            assert view.entry(1).donor == 0
            await second.client.reassign(1, view.entry(1).attempt, "its link is down")
            view = await second.sees(lambda view: view.entry(1).attempt == 2)
            assert view.entry(1).donor == 2
            await second.die()

    run(scenario())


def test_a_replaced_process_is_told(tmp_path: Path) -> None:
    """A partition of one worker: it comes back after its place was taken."""

    async def scenario() -> None:
        async with running(tmp_path) as (coordinator, address), workers(address, 3) as fleet:
            coordinator.membership.seats[2].attached = False  # as after a cut
            second = Worker(address)
            await second.join(worker=2)
            assert "took over" in str(await fleet[2].is_told_to_go())
            with pytest.raises(OutOfSync):
                await fleet[2].report(0, 0)
            await second.die()

    run(scenario())


def test_a_whole_run_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, address), workers(address, 3) as fleet:
            for worker in fleet:
                await worker.report(12, 12)
            run_id = fleet[0].views[-1].run_id
            for worker in fleet:
                await worker.client.leave("stopped", "Ctrl-C")
        async with running(tmp_path) as (_, address):
            fleet = [Worker(address) for _ in range(3)]
            await fleet[0].join(run_id=run_id, checkpoint_rounds=[8, 12])
            await fleet[1].join(run_id=run_id, checkpoint_rounds=[8, 12])
            await fleet[2].join()
            view = await fleet[0].sees(lambda view: view.phase == "running")
            assert [(view.entry(w).start, view.entry(w).round) for w in (0, 1)] == [
                ("checkpoint", 12)
            ] * 2
            view = await fleet[2].sees(lambda view: view.entry(2).start == "donor")
            assert view.entry(2).round == 13
            assert view.log.member_log().planned(12).workers == (0, 1)
            for worker in fleet:
                await worker.die()

    run(scenario())


def test_a_round_costs_no_push_and_an_error_is_told_to_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, address), workers(address, 3) as fleet:
            settled = fleet[0].views[-1].revision
            for index in range(10):
                for worker in fleet:
                    await worker.report(index, index)
            assert fleet[0].client.calls["Report"] == 10
            await fleet[2].client.leave("error", "RuntimeError: out of memory")
            view = await fleet[0].sees(lambda view: view.losses)
            assert (view.losses[0].cause, view.losses[0].reason) == (
                "error", "RuntimeError: out of memory",
            )  # fmt: skip
            revisions = [v.revision for v in fleet[0].views if v.revision >= settled]
            assert revisions == [settled, view.revision]

    run(scenario())


def test_nonsense_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, address), workers(address, 3) as fleet:
            async with grpc.aio.insecure_channel(address) as channel:
                foreign = encode(StatusRequest()).replace(b'"protocol":1', b'"protocol":2')
                for method in ("Join", "Report", "Reassign", "Leave", "Status", "Watch"):
                    for data in (b"", b"\x00" * 99, b"[" * 100_000, b"{}", b"1" * 9999, foreign):
                        if method == "Watch":
                            stream = channel.unary_stream(f"/{SERVICE}/Watch")(data)
                            answers = [answer async for answer in stream]
                        else:
                            answers = [await channel.unary_unary(f"/{SERVICE}/{method}")(data)]
                        (refusal,) = [decode(answer, Refusal) for answer in answers]
                        code = "protocol" if data is foreign else "malformed"
                        assert (refusal.code, refusal.permanent) == (code, True)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(f"/{SERVICE}/Status")(b" " * (2 << 20))
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await fleet[0].report(1, 1)

    run(scenario())


def test_two_coordinators_do_not_share_a_store_or_a_port(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, address):
            with pytest.raises(ConfigError, match="in use by another coordinator"):
                Coordinator(settings(tmp_path))
            second = Coordinator(settings(tmp_path / "second", listen=address))
            with pytest.raises(ConfigError, match="cannot listen"):
                await second.start()
            await second.close()
        with pytest.raises(ConfigError, match=r"configuration\.seed was 0 and is now 1"):
            Coordinator(settings(tmp_path, configuration={**RECIPE, "seed": 1}))

    run(scenario())


def test_serve_ends_when_it_is_told_to_and_with_the_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        stop = asyncio.Event()
        status = await serve(settings(tmp_path), stop=stop, on_start=lambda _: stop.set())
        assert status.phase == "gathering"
        addresses: asyncio.Queue[str] = asyncio.Queue()
        events: list[str] = []
        serving = asyncio.create_task(
            serve(
                settings(tmp_path / "one", workers=1),
                on_start=addresses.put_nowait,
                listener=lambda kind, _: events.append(kind),
                linger_s=0.1,
            )
        )
        async with workers(await addresses.get(), 1) as fleet:
            await fleet[0].report(49, 50)
            await fleet[0].client.leave("finished", "all rounds done")
            assert (await serving).phase == "ended"
        assert events == ["entry", "entry"]

    run(scenario())


def test_strangers_who_say_nothing_keep_nobody_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as (_, address), workers(address, 3) as fleet:
            host, port = address.split(":")
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
            for worker in fleet:
                assert await worker.report(1, 1)
            await fleet[2].die()
            await fleet[0].sees(is_lost(2))
            for _, writer in silent:
                writer.close()
                with contextlib.suppress(ConnectionError):
                    await writer.wait_closed()

    run(scenario())
