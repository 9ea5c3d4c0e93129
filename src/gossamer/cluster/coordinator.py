"""The coordinator: a small process that knows who takes part, and is never on the way of data.

It stores what it decides before it says so, so that one that is killed and started again at the
same address goes on. Workers train on while it is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from gossamer.cluster.addresses import dial, is_loopback, is_wildcard, join_address, split_address
from gossamer.cluster.certs import Credentials, place_of
from gossamer.cluster.control import KEEPALIVE_OPTIONS, SERVICE
from gossamer.cluster.membership import KEEPALIVE_S, Membership
from gossamer.cluster.messages import (
    MAX_MESSAGE_BYTES,
    Accepted,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    MalformedMessage,
    Message,
    ReassignRequest,
    Refusal,
    Report,
    Status,
    StatusRequest,
    View,
    WatchRequest,
    decode,
    encode,
)
from gossamer.cluster.overview import status_of, view_of
from gossamer.cluster.plan import CoordinatorSettings, Ping, Refused
from gossamer.cluster.store import Store
from gossamer.errors import CheckpointError, ConfigError
from gossamer.fingerprint import fingerprint, first_difference

_SERVER_OPTIONS: list[tuple[str, int]] = [
    *KEEPALIVE_OPTIONS,
    ("grpc.so_reuseport", 0),  # a second coordinator at the same port is a mistake
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8192),
    ("grpc.absolute_max_metadata_size", 16384),
    ("grpc.max_concurrent_streams", 64),
    ("grpc.server_handshake_timeout_ms", 5000),  # for those who connect and say nothing
]
_CONNECTIONS_A_WORKER = 4  # its own, the former one's and a terminal view's; and some for strangers
_log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
Listener = Callable[[str, dict[str, Any]], None]


class Clock(Protocol):
    """Where the time comes from."""

    def now(self) -> float:
        """Seconds; never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's own."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class Coordinator:
    """One run's coordinator. `start` it, then `close` it.

    Args:
        settings: see there.
        credentials: the coordinator's certificate; None only where it listens on this machine.
        clock: replaced in tests.
        listener: told what happens, as (kind, fields).

    Raises `ConfigError`, or `CheckpointError` where the store is damaged.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        credentials: Credentials | None = None,
        clock: Clock | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.settings, self._credentials = settings, credentials
        self._plan, self._clock = settings.plan(), clock or SystemClock()
        self._host, self._port = split_address(settings.listen)
        if credentials is None and not is_loopback(self._host):
            raise ConfigError(
                f"listening at {settings.listen}, where other machines can connect, needs "
                f"certificates (`gossamer certs` makes them)"
            )
        self._listener = listener
        self._fingerprint = fingerprint(settings.configuration)
        self._store = Store(settings.store)
        try:
            self.membership = self._resume()
        except (ConfigError, CheckpointError):
            self._store.close()
            raise
        self._stored: tuple[int, int, bool] | None = None  # revision, newest round, history
        self._view = b""
        self._watchers: dict[int, _Watcher] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None
        self._closing = False
        self.ended = asyncio.Event()  # the run is over
        self.failed: asyncio.Future[None] | None = None  # this coordinator cannot go on

    def _resume(self) -> Membership:
        """The stored run, or a new one."""
        saved, now = self._store.load(), self._clock.now()
        if saved is None:
            run_id = self.settings.run_id
            history = run_id is not None
            return Membership(self._plan, run_id or uuid.uuid4().hex, history=history, now_s=now)
        difference = first_difference(saved["identity"], self.settings.identity())
        if difference is not None:
            raise ConfigError(
                f"{self.settings.store} holds a run of another configuration: {difference}; go on "
                f"with that one, or name another file"
            )
        membership = Membership.load(self._plan, saved["membership"], now_s=now)
        if self.settings.run_id not in (None, membership.run_id):
            raise ConfigError(
                f"{self.settings.store} holds run {membership.run_id}, not {self.settings.run_id}"
            )
        return membership

    # --------------------------------------------------------------------------------------- life

    async def start(self) -> str:
        """Listen, and return the address. Raises `ConfigError` where that cannot be."""
        self.failed = asyncio.get_running_loop().create_future()
        processes = self._plan.num_workers + self._plan.num_syncers
        connections = 64 + _CONNECTIONS_A_WORKER * processes
        options = [*_SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", connections)]
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=64 + 8 * processes)
        server.add_generic_rpc_handlers((self._handlers(),))
        address = join_address(self._host, self._port)
        try:
            if self._credentials is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._credentials.for_server())
        except RuntimeError as error:
            raise ConfigError(f"cannot listen at {address}: {error}") from None
        self._commit()
        await server.start()
        self._server = server
        self._start_task(self._tick())
        return join_address(self._host, port)

    async def close(self, grace_s: float = 1.0) -> None:
        """Hang up; the store keeps the run."""
        self._closing = True
        for watcher in self._watchers.values():
            watcher.news.set()
        if self._server is not None:
            await self._server.stop(grace_s)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._store.close()

    def status(self) -> Status:
        """The whole run, for people."""
        return status_of(self.membership, self._clock.now())

    async def _tick(self) -> None:
        """Let leases run out."""
        every_s = min(0.25, self._plan.deadline_s / 8)
        while True:
            await self._clock.sleep(every_s)
            self.membership.tick(self._clock.now())
            self._commit()

    def _start_task(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception())

    def _fail(self, error: BaseException | None) -> None:
        if error is not None and self.failed is not None and not self.failed.done():
            self.failed.set_exception(error)

    def _commit(self) -> None:
        """Store what has changed, then tell everybody, and dial whom the membership suspects."""
        membership = self.membership
        newest = (membership.revision, membership.log.newest_started, membership.history)
        if newest != self._stored:
            lazy = self._stored is not None and newest[0] == self._stored[0]
            events = membership.take_events()
            document = {"identity": self.settings.identity(), "membership": membership.dump()}
            self._store.save(membership.revision, document, events, lazy=lazy)
            self._stored = newest
            for kind, fields in events:
                _log.info("%s %s", kind, fields)
                if self._listener is not None:
                    self._listener(kind, fields)
            if not lazy:
                self._view = encode(view_of(membership))
                for watcher in self._watchers.values():
                    watcher.news.set()
        if membership.phase == "ended":
            self.ended.set()
        for ping in membership.take_pings():
            self._start_task(self._ping(ping))

    async def _ping(self, ping: Ping) -> None:
        answer = await dial(ping.address, KEEPALIVE_S)
        self.membership.pinged(ping.worker, ping.incarnation, answer, self._clock.now())
        self._commit()

    # ----------------------------------------------------------------------------------- requests

    def _handlers(self) -> grpc.GenericRpcHandler:
        unary = {
            "Join": (JoinRequest, self._join),
            "Report": (Report, self._report),
            "Reassign": (ReassignRequest, self._reassign),
            "Leave": (LeaveRequest, self._leave),
            "Status": (StatusRequest, self._status),
        }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(self._answering(kind, handle))  # type: ignore[arg-type]
            for name, (kind, handle) in unary.items()
        }
        handlers["Watch"] = grpc.unary_stream_rpc_method_handler(self._watch)
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _answering(self, kind: type[M], handle: Any) -> Any:
        """The handler of one kind of request: bytes in, bytes out."""

        async def answer(data: bytes, context: Any) -> bytes:
            try:
                reply = await handle(self._read(data, kind), context)
                self._commit()
            except Refused as error:
                return encode(_refusal(error))
            except CheckpointError as error:
                self._fail(error)
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            return encode(reply)

        return answer

    def _read(self, data: bytes, kind: type[M]) -> M:
        try:
            message = decode(data, kind)
        except MalformedMessage as error:
            raise Refused(error.code, str(error), permanent=True) from None
        if isinstance(message, Refusal):
            raise Refused("malformed", "a refusal is no request", permanent=True)
        return message

    def _certified(self, context: Any, worker: int | None) -> int | None:
        """The index that a peer may use: the one in its certificate, where there are any."""
        if self._credentials is None:
            return worker
        name = context.auth_context()["x509_common_name"][0].decode()
        place = place_of(name, self._plan.num_workers)
        if place is None or worker not in (None, place):
            wanted = "a worker" if worker is None else f"worker {worker}"
            raise Refused(
                "identity", f"the certificate of {name!r} is not that of {wanted}", permanent=True
            )
        return place

    async def _join(self, request: JoinRequest, context: Any) -> JoinReply:
        worker = self._certified(context, request.worker)
        self._check_configuration(request)
        warnings = await self._check_address(request.address)
        request = request.model_copy(update={"worker": worker})
        seat = self.membership.join(request, self._clock.now())
        self._commit()
        return JoinReply(
            worker=seat.worker,
            incarnation=seat.incarnation,
            deadline_s=self._plan.deadline_s,
            report_every_s=min(1.0, self._plan.deadline_s / 8),
            warnings=tuple(warnings),
            view=view_of(self.membership),
        )

    def _check_configuration(self, request: JoinRequest) -> None:
        if request.fingerprint == self._fingerprint:
            return
        try:
            given = json.loads(request.configuration)
        except (ValueError, RecursionError):
            raise Refused("malformed", "the configuration is not JSON", permanent=True) from None
        difference = first_difference(self.settings.configuration, given)
        raise Refused(
            "configuration",
            f"this worker's configuration is not the run's: {difference or 'fingerprints differ'} "
            f"(the run's first); start it with the run's own recipe",
            permanent=True,
        )

    async def _check_address(self, address: str) -> list[str]:
        """Refuse an address that does not lead to the worker; warn of one that may not."""
        try:
            host, port = split_address(address)
        except ConfigError as error:
            raise Refused("address", str(error), permanent=True) from None
        if is_wildcard(host) or port == 0:
            raise Refused(
                "address",
                f"nobody can connect to {address}: --advertise says where this worker is reached",
                permanent=True,
            )
        warnings = []
        if is_loopback(host) and not is_loopback(self._host):
            warnings.append(
                f"{address} means this machine to whoever uses it: workers on other machines will "
                f"not reach it; --advertise HOST:PORT names an address that they can"
            )
            _log.warning("a worker joins: %s", warnings[0])
        if await dial(address, KEEPALIVE_S) != "accepted":
            raise Refused(
                "address",
                f"the coordinator cannot connect to {address}; --advertise HOST:PORT names an "
                f"address where this worker is reached, and its firewall must let that in",
                permanent=True,
            )
        return warnings

    async def _report(self, request: Report, context: Any) -> Accepted:
        self._certified(context, request.worker)
        self.membership.report(request, self._clock.now())
        return Accepted(revision=self.membership.revision)

    async def _reassign(self, request: ReassignRequest, context: Any) -> View:
        self._certified(context, request.worker)
        self.membership.reassign(request, self._clock.now())
        self._commit()
        return view_of(self.membership)

    async def _leave(self, request: LeaveRequest, context: Any) -> Accepted:
        self._certified(context, request.worker)
        self.membership.leave(request, self._clock.now())
        return Accepted(revision=self.membership.revision)

    async def _status(self, request: StatusRequest, context: Any) -> Status:
        return self.status()

    async def _watch(self, data: bytes, context: Any) -> None:
        """Each new view, for as long as the worker is there."""
        try:
            request = self._read(data, WatchRequest)
            self._certified(context, request.worker)
            self.membership.attach(request, self._clock.now())
            self._commit()
        except Refused as error:
            await context.write(encode(_refusal(error)))
            return
        watcher, former = _Watcher(), self._watchers.get(request.worker)
        self._watchers[request.worker] = watcher
        if former is not None:
            former.news.set()
        try:
            while self._watchers.get(request.worker) is watcher and not self._closing:
                watcher.news.clear()
                self.membership.check_alive(request)
                await context.write(self._view)
                await watcher.news.wait()
        except Refused as error:
            await context.write(encode(_refusal(error)))
        finally:
            if self._watchers.get(request.worker) is watcher:
                del self._watchers[request.worker]
                if not self._closing:
                    now = self._clock.now()
                    self.membership.detach(request.worker, request.incarnation, now)
                    self._commit()


class _Watcher:
    """One open watch stream."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.news.set()


def _refusal(error: Refused) -> Refusal:
    return Refusal(code=error.code, message=str(error)[:2048], permanent=error.permanent)


async def serve(
    settings: CoordinatorSettings,
    *,
    credentials: Credentials | None = None,
    stop: asyncio.Event | None = None,
    listener: Listener | None = None,
    on_start: Callable[[str], None] | None = None,
    linger_s: float = 2.0,
) -> Status:
    """Coordinate one run until it has ended, or `stop` is set.

    Args:
        settings, credentials, listener: see `Coordinator`.
        stop: ends it early; the store keeps the run.
        on_start: told the address that it listens at.
        linger_s: how long the last view can still be had.

    Returns the last status. Raises `ConfigError` or `CheckpointError`.
    """
    coordinator = Coordinator(settings, credentials=credentials, listener=listener)
    try:
        address = await coordinator.start()
        if on_start is not None:
            on_start(address)
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(coordinator.ended.wait())]
        if stop is not None:
            waits.append(asyncio.ensure_future(stop.wait()))
        assert coordinator.failed is not None
        try:
            await asyncio.wait([*waits, coordinator.failed], return_when="FIRST_COMPLETED")
            if coordinator.failed.done():
                coordinator.failed.result()
            if coordinator.ended.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(linger_s):
                        await (stop.wait() if stop is not None else asyncio.Event().wait())
        finally:
            for wait in waits:
                wait.cancel()
        return coordinator.status()
    finally:
        await coordinator.close()
