"""A worker's line to the coordinator: calls that wait for it when it is away, and end when told so.

What cannot get better ends at once: a certificate that is refused, another protocol, another
configuration. What can is tried again, quietly and with growing pauses: a coordinator that
restarts, a place that is still taken by a process that has just died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal, TypeVar

import grpc
import grpc.aio

from gossamer.cluster.addresses import is_loopback, split_address
from gossamer.cluster.certs import COORDINATOR, Credentials, channel_options
from gossamer.cluster.handshake import tls_fault
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
    Role,
    Status,
    StatusRequest,
    View,
    WatchRequest,
    decode,
    encode,
)
from gossamer.errors import ConfigError, OutOfSync
from gossamer.fingerprint import canonical, fingerprint

SERVICE = "gossamer.Coordinator"
KEEPALIVE_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 2000),
    ("grpc.keepalive_timeout_ms", 1500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *KEEPALIVE_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3500),  # also how long a connection may take to come about
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.max_receive_message_length", 2 * MAX_MESSAGE_BYTES),
]
CALL_TIMEOUT_S = 10.0
_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_TEMPORARY = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,  # which a lost connection may look like
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
    }
)
_log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


class JoinRefused(ConfigError):
    """The coordinator does not let this process take part; `code` as in `Refusal`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Away(Exception):
    """The coordinator is out of reach, or will answer otherwise in a while."""

    def __init__(self, message: str, refusal: Refusal | None = None) -> None:
        super().__init__(message)
        self.refusal = refusal


class Client:
    """One process's line to the coordinator at `address`.

    Args:
        address: HOST:PORT of the coordinator.
        credentials: this process's certificate; None only for an address on this machine.

    Raises `ConfigError` for an address elsewhere without credentials.
    """

    def __init__(self, address: str, *, credentials: Credentials | None = None) -> None:
        host, _ = split_address(address)
        if credentials is None and not is_loopback(host):
            raise ConfigError(
                f"the coordinator at {address} is on another machine: certificates are needed "
                f"(`gossamer certs` makes them)"
            )
        self.address, self._credentials = address, credentials
        self.calls: Counter[str] = Counter()  # made so far, by kind
        self.me: JoinReply | None = None
        self.connected = False
        self._random = random.Random(uuid.uuid4().int)  # spreads the retries
        options: list[tuple[str, Any]] = list(_CHANNEL_OPTIONS)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options)
        else:
            options += channel_options(COORDINATOR)
            self._channel = grpc.aio.secure_channel(address, credentials.for_channel(), options)

    async def close(self) -> None:
        """Hang up."""
        await self._channel.close()

    # ------------------------------------------------------------------------------------ requests

    async def join(
        self,
        *,
        address: str,
        configuration: dict[str, Any],
        worker: int | None = None,
        role: Role = "worker",
        run_id: str | None = None,
        checkpoint_rounds: Sequence[int] = (),
        patience_s: float = 120.0,
    ) -> JoinReply:
        """Become part of the run; waits for a coordinator that is away as long as it takes.

        Args:
            address: where the other workers reach this one's transport.
            configuration: JSON document that must equal the coordinator's.
            worker: the index wanted; None: the one in the certificate, or any that is free.
            run_id: the run that the local state belongs to; None without one.
            checkpoint_rounds: rounds completed in each checkpoint that is there.
            patience_s: how long to wait for a place that is still taken.

        Raises `JoinRefused`, or `ConfigError` where the connection cannot come about.
        """
        request = JoinRequest(
            worker=worker,
            role=role,
            address=address,
            nonce=uuid.uuid4().hex,
            run_id=run_id,
            checkpoint_rounds=tuple(checkpoint_rounds),
            configuration=canonical(configuration),
            fingerprint=fingerprint(configuration),
        )
        self.me = await self._persist("Join", request, JoinReply, patience_s)
        return self.me

    async def watch(self, position: Callable[[], tuple[int, int]]) -> AsyncIterator[View]:
        """The newest view whenever there is one, for ever; reconnects by itself.

        Args:
            position: gives (newest round started or -1, rounds completed) when asked.

        Raises `OutOfSync` where this worker was given up, `JoinRefused` or `ConfigError`.
        """
        failures = 0
        while True:
            started, completed = position()
            request = WatchRequest(
                **self._identity(), round_started=started, rounds_completed=completed
            )
            method: Any = self._channel.unary_stream(f"/{SERVICE}/Watch")
            stream: grpc.aio.UnaryStreamCall[bytes, bytes] = method(encode(request))
            self.calls["Watch"] += 1
            try:
                async for data in stream:
                    view = self._read(data, View)
                    failures = 0
                    self._back()
                    yield view
                raise _Away("the coordinator has hung up")
            except (grpc.aio.AioRpcError, _Away) as error:
                failures += 1
                await self._pause(await self._away(error), failures)
            finally:
                stream.cancel()

    async def report(
        self,
        *,
        round_started: int,
        rounds_completed: int,
        progress: int,
        waiting: bool = False,
        loss: float | None = None,
        utilization: float = 0.0,
        blocked_s: float = 0.0,
        bytes_sent: int = 0,
        records: dict[str, float] | None = None,
    ) -> bool:
        """Say how far this worker is (fields as in `Report`); once, as the next one says more.

        Returns whether the coordinator has it. Raises `OutOfSync` where this worker was given up,
        `JoinRefused` or `ConfigError`.
        """
        request = Report(
            **self._identity(),
            round_started=round_started,
            rounds_completed=rounds_completed,
            progress=progress,
            waiting=waiting,
            loss=loss,
            utilization=utilization,
            blocked_s=blocked_s,
            bytes_sent=bytes_sent,
            records=records or {},
        )
        try:
            await self._call("Report", request, Accepted)
        except _Away as error:
            self._lost(str(error))
            return False
        return True

    async def reassign(self, joiner: int, attempt: int, reason: str) -> View:
        """The joiner's present donor cannot serve it (the joiner or the donor says so)."""
        request = ReassignRequest(
            **self._identity(), joiner=joiner, attempt=attempt, reason=reason[:2048]
        )
        return await self._persist("Reassign", request, View)

    async def leave(
        self,
        cause: Literal["finished", "stopped", "error", "out_of_sync"],
        reason: str,
        *,
        timeout_s: float = 2.0,
    ) -> bool:
        """Say goodbye; whether the coordinator has heard it.

        Raises `OutOfSync` where this worker was given up before.
        """
        request = LeaveRequest(**self._identity(), cause=cause, reason=reason[:2048])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._persist("Leave", request, Accepted)
                return True
        return False

    async def status(self) -> Status:
        """The whole run, for people."""
        return await self._persist("Status", StatusRequest(), Status)

    # ----------------------------------------------------------------------------------- machinery

    def _identity(self) -> dict[str, Any]:
        if self.me is None:
            raise ConfigError("join before anything else")
        return {
            "worker": self.me.worker,
            "run_id": self.me.view.run_id,
            "incarnation": self.me.incarnation,
        }

    async def _persist(
        self, method: str, request: Message, kind: type[M], patience_s: float | None = None
    ) -> M:
        """Call until there is an answer; `patience_s` bounds refusals that may pass only."""
        failures, loop = 0, asyncio.get_running_loop()
        refused_since_s: float | None = None
        while True:
            try:
                return await self._call(method, request, kind)
            except _Away as away:
                failures += 1
                if away.refusal is None:
                    refused_since_s = None
                    self._lost(str(away))
                else:
                    refused_since_s = refused_since_s or loop.time()
                    if patience_s is not None and loop.time() - refused_since_s >= patience_s:
                        raise JoinRefused(away.refusal.code, away.refusal.message) from None
                await self._pause(None, failures)

    async def _call(self, method: str, request: Message, kind: type[M]) -> M:
        """One call. Raises `_Away` where another may do better."""
        self.calls[method] += 1
        call: Any = self._channel.unary_unary(f"/{SERVICE}/{method}")
        try:
            data = await call(encode(request), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _Away(await self._away(error)) from None
        answer = self._read(data, kind)
        self._back()
        return answer

    def _read(self, data: bytes, kind: type[M]) -> M:
        try:
            answer = decode(data, kind)
        except MalformedMessage as error:
            raise JoinRefused(error.code, f"{self.address}: {error}") from None
        if not isinstance(answer, Refusal):
            return answer
        if answer.code == "expelled":
            raise OutOfSync(answer.message)
        if answer.permanent:
            raise JoinRefused(answer.code, answer.message)
        raise _Away(answer.message, answer)

    async def _away(self, error: grpc.aio.AioRpcError | _Away) -> str:
        """What to say of a failure that may pass. Raises `ConfigError` for one that cannot."""
        if isinstance(error, _Away):
            return str(error)
        text = f"{error.code().name.lower()}: {error.details()}"
        if error.code() not in _TEMPORARY:
            raise JoinRefused("call", f"the coordinator at {self.address} fails: {text}")
        if self.connected or error.code() is not grpc.StatusCode.UNAVAILABLE:
            return text
        fault = await tls_fault(self.address, self._credentials, CALL_TIMEOUT_S)
        if fault is not None:
            raise ConfigError(fault)
        return text

    async def _pause(self, lost: str | None, failures: int) -> None:
        if lost is not None:
            self._lost(lost)
        pause_s = _PAUSES_S[min(failures, len(_PAUSES_S)) - 1]
        await asyncio.sleep(pause_s * self._random.uniform(0.75, 1.25))

    def _lost(self, why: str) -> None:
        if self.connected:
            _log.warning("the coordinator at %s is out of reach (%s)", self.address, why)
        self.connected = False

    def _back(self) -> None:
        if not self.connected:
            _log.info("connected with the coordinator at %s", self.address)
        self.connected = True
