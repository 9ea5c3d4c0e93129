"""The sending half of the transport: one message from `send` to the receiver's verdict."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import grpc
from grpc import aio
from torch import Tensor

from gossamer.cluster.pacing import Line, Turn, Watchdog
from gossamer.cluster.wire import (
    CHUNK_BYTES_MAX,
    NO_LIFE,
    Header,
    Reason,
    Refused,
    Reply,
    chunk_of,
    pack_header,
    pack_trailer,
    parse_reply,
    raw_bytes,
)
from gossamer.errors import CommError, LinkFailed, PayloadCorrupt, PeerLost

SERVICE = "gossamer.Transport"
MESSAGE, WITHDRAW = "Message", "Withdraw"
TAKEN, WITHDRAWN = b"T", b"W"  # what a withdrawal is answered with
WAITS = b""  # in a chunk's place: the sender lives, and sends others before

_FIRST_CHUNK_BYTES, _LEAST_CHUNK_BYTES = 1 << 14, 1 << 12
_QUICK_S, _SLOW_S = 0.02, 0.25  # a write that takes less or more changes the size of the next
_PACED_PIECE_S = 0.01  # on a line of limited rate a piece takes so long
_BACKOFF_S, _BACKOFF_MAX_S = 0.05, 0.5

_PERMANENT = ("ssl_error_ssl", "certificate", "verification")
EAGER_BYTES_MAX = 4 << 20
"""What a peer may be sent before it has said that it has room, all messages together."""

_EAGER_BYTES = 1 << 20  # of one message

RPC_ERRORS = (aio.AioRpcError, aio.BaseError, asyncio.InvalidStateError)
"""What gRPC raises where a stream is no more."""


@dataclass
class Traffic:
    """What a transport has done so far.

    Args:
        bytes_sent, bytes_received: frames handed to and taken from gRPC, headers and replies
            included; TLS and HTTP/2 add about half a percent.
        delivered, taken_in: messages accepted by others, and accepted here.
        retries: attempts after a connection broke.
        refused: messages that were not taken in here, by reason.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    delivered: int = 0
    taken_in: int = 0
    retries: int = 0
    refused: dict[str, int] = field(default_factory=dict)


class _Broken(Exception):
    """An attempt ended without a verdict."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        # Retrying does not make a certificate fit.
        self.permanent = any(word in message.lower() for word in _PERMANENT)


class Route(Protocol):
    """The way to one peer, as a message needs it."""

    worker: int
    life: bytes  # the peer's, as far as it is known
    eager_bytes: int  # that may still be sent to the peer before it asks for them

    def channel(self, control: bool) -> aio.Channel | None:
        """An open or opening connection; None where no address is known."""

    def slots(self, control: bool) -> asyncio.Semaphore:
        """How many messages may be on their way."""

    @property
    def turn(self) -> asyncio.Lock:
        """Held by the message whose payload is being written, so that one comes after the other."""


@dataclass(frozen=True, slots=True)
class Sender:
    """What all messages of one transport share."""

    keepalive_s: float
    delay_s: float
    line: Line
    traffic: Traffic
    background: Callable[[asyncio.Task[None]], None]  # keeps a task until it is done


class Sending:
    """One message on its way; implements `Transfer`.

    Args:
        after: starts when these have arrived or failed. A receiver takes a message of a later round
            or step as proof that none of an earlier one will come; two connections, and retries,
            would otherwise let the later one come first.
    """

    def __init__(
        self,
        header: Header,
        payload: Tensor,
        route: Route,
        sender: Sender,
        *,
        control: bool,
        after: Sequence[Sending] = (),
    ) -> None:
        self.header, self._route, self._sender = header, route, sender
        self._after = tuple(after)
        self._payload: Tensor | None = payload
        self._control = control
        loop = asyncio.get_running_loop()
        self._done: asyncio.Future[None] = loop.create_future()
        self._done.add_done_callback(_mark_read)
        self._watchdog: Watchdog | None = None
        self._chunk_bytes = _FIRST_CHUNK_BYTES
        self._begun = self._withdrawing = False
        self.is_written = False  # all of it has been handed over, in this attempt
        self._on_written: Callable[[Sending], None] | None = None
        self._moved = -1  # bytes that the receiver has confirmed
        self._borrowed = 0
        self._go: asyncio.Future[int] | None = None  # from where to send
        self._turn: Turn | None = None
        self._task = loop.create_task(self._run(), name=f"send {header.tag} to {route.worker}")
        sender.background(self._task)

    # ------------------------------------------------------------------------------ for its owner

    async def delivered(self) -> None:
        """See `Transfer.delivered`."""
        await asyncio.shield(self._done)

    def cancel(self) -> None:
        """See `Transfer.cancel`. `delivered` then tells whether the receiver had taken it."""
        self.abandon(LinkFailed(f"worker {self.header.sender} gave the transfer up"), at_once=False)

    def abandon(self, error: CommError, *, at_once: bool = True) -> None:
        """End it with `error`, and withdraw what the receiver has not taken.

        Unless `at_once`, its fate is open until the receiver has answered to the withdrawal.
        """
        if self._done.done() and self._done.exception() is not None:
            return
        if not at_once and self._withdrawing:
            return
        self._task.cancel()
        self._give_up(error, at_once=at_once)

    def _give_up(self, error: CommError, *, at_once: bool) -> None:
        if self._done.done():  # it was accepted: from now on that is open again
            self._done = asyncio.get_running_loop().create_future()
            self._done.add_done_callback(_mark_read)
        self._payload = None
        withdraws = self._begun and not self._withdrawing and not isinstance(error, PeerLost)
        withdraws = withdraws and self.header.note is None  # a letter ends with its stream
        if at_once or not withdraws:
            self._done.set_exception(error)
        if withdraws:
            self._withdrawing = True
            loop = asyncio.get_running_loop()
            self._sender.background(loop.create_task(self._withdraw(error)))

    async def settled(self) -> None:
        """Wait until it has arrived or has failed."""
        await asyncio.wait([self._done])

    def precedes(self, header: Header) -> bool:
        """Whether `header` is of a later round or step of the same kind, to the same worker."""
        mine, other = self.header.tag, header.tag
        return (
            self.header.receiver == header.receiver
            and mine.kind == other.kind
            and (mine.round_index, mine.step) < (other.round_index, other.step)
        )

    def when_done(self, callback: Callable[[Sending], None]) -> None:
        """Call back once its task has ended."""
        self._task.add_done_callback(lambda _: callback(self))

    def when_written(self, callback: Callable[[Sending], None]) -> None:
        """Call back once all of it has been handed over, in each attempt."""
        self._on_written = callback

    @property
    def is_done(self) -> bool:
        """Whether its fate is known."""
        return self._done.done()

    # ------------------------------------------------------------------------------- its own task

    async def _run(self) -> None:
        try:
            for earlier in self._after:
                await earlier.settled()
            self._after = ()
            async with self._route.slots(self._control):
                await self._deliver()
        except CommError as error:
            if not self._done.done():
                self._done.set_exception(error)
        else:
            if not self._done.done():
                self._sender.traffic.delivered += 1
                self._done.set_result(None)
        finally:
            self._payload = None
            if not self._done.done() and not self._withdrawing:
                self._done.set_exception(LinkFailed("the transport was closed"))

    async def _deliver(self) -> None:
        """Attempts until there is a verdict, or nothing has moved for the keepalive."""
        task = asyncio.current_task()
        assert task is not None
        dog = self._watchdog = Watchdog(self._sender.keepalive_s, task.cancel)
        trouble = "it does not answer"
        backoff = _BACKOFF_S
        try:
            while True:
                try:
                    verdict = await self._attempt()
                    if verdict.reason is not Reason.GONE or verdict.kind == "accepted":
                        break
                    trouble = verdict.text  # it may not know yet that we are back
                except _Broken as broken:
                    trouble = str(broken)
                    if broken.permanent:
                        raise LinkFailed(
                            f"worker {self._route.worker} is not whom our certificates expect, or "
                            f"does not trust ours: {trouble}"
                        ) from None
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _BACKOFF_MAX_S)
        except asyncio.CancelledError:
            if not dog.tripped or self._done.done():
                raise
            task.uncancel()
            error = LinkFailed(self._failure(trouble))
            self._give_up(error, at_once=True)
            raise error from None
        finally:
            dog.stop()
        await asyncio.sleep(self._sender.delay_s)
        if verdict.kind == "refused":
            raise error_of(verdict.reason, f"worker {self._route.worker}: {verdict.text}")

    def _failure(self, trouble: str) -> str:
        return (
            f"nothing moved from worker {self.header.sender} to worker {self._route.worker} for "
            f"{self._sender.keepalive_s:g} s: {trouble}"
        )

    async def _attempt(self) -> Reply:
        """One stream. Returns the verdict; raises `_Broken` where there is none."""
        channel = self._route.channel(self._control)
        if channel is None:
            raise _Broken(f"no address is known for worker {self._route.worker}")
        header = replace(self.header, receiver_life=self._route.life, retry=self._begun)
        self._sender.traffic.retries += self._begun
        self._go = asyncio.get_running_loop().create_future()
        self._begun, self.is_written = True, False
        method: aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"/{SERVICE}/{MESSAGE}"
        )
        call: aio.StreamStreamCall[bytes, bytes] = method()
        writer = asyncio.get_running_loop().create_task(self._write(call, header))
        verdict: Reply | None = None
        try:
            verdict = await self._read(call)
            if verdict.kind == "accepted":
                self._sender.background(asyncio.get_running_loop().create_task(_hang_up(call)))
            return verdict
        except RPC_ERRORS as error:
            raise _Broken(_describe(error)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling() == 0:  # the call was cancelled, not we
                raise _Broken("the receiver ended the stream") from None
            raise
        finally:
            writer.cancel()
            if verdict is None or verdict.kind != "accepted":
                call.cancel()
            await asyncio.wait([writer])
            self._give_back()
            if not writer.cancelled() and (failure := writer.exception()) is not None:
                raise failure

    async def _read(self, call: aio.StreamStreamCall[bytes, bytes]) -> Reply:
        """Replies until the verdict."""
        assert self._watchdog is not None and self._go is not None
        while True:
            frame = await call.read()
            if not isinstance(frame, bytes):
                raise _Broken(f"the stream ended early: {await call.details() or 'no reason'}")
            self._sender.traffic.bytes_received += len(frame)
            try:
                reply = parse_reply(frame)
            except Refused as refused:
                raise LinkFailed(f"worker {self._route.worker}: {refused}") from None
            if reply.kind in ("accepted", "refused"):
                return reply
            if reply.kind == "go":
                self._give_back()
                if self._route.life == NO_LIFE:
                    self._route.life = reply.life
                if not self._go.done():
                    self._go.set_result(reply.num_bytes)
                if reply.num_bytes <= self._moved:
                    continue  # a connection that breaks again and again moves nothing
            elif not self._go.done() and self._turn is not None:
                self._turn.end()  # there is no room for it, but perhaps for one behind it
            self._moved = max(self._moved, reply.num_bytes)
            self._watchdog.feed()

    async def _write(self, call: aio.StreamStreamCall[bytes, bytes], header: Header) -> None:
        """Header, chunks and trailer. What goes wrong with the stream, its reader sees as well."""
        payload, go = self._payload, self._go
        if payload is None:
            return  # given up before this attempt began
        assert go is not None
        raw = raw_bytes(payload)
        checksum, place = 0, 0
        turn = self._turn = Turn(self._route.turn)
        try:
            await self._put(call, pack_header(header))
            if not self._control:
                await turn.take(self._sender.keepalive_s / 4, lambda: self._put(call, WAITS))
            if not header.retry:  # beginning before the receiver answers saves a round trip
                place = raw.numel() if self._control else min(self._borrow(), raw.numel())
                checksum = await self._put_chunks(call, raw, 0, place, checksum)
            if place < raw.numel() or header.retry:
                offset = await go
                if header.retry:
                    checksum, place = await self._skip(raw, offset)
                checksum = await self._put_chunks(call, raw, place, raw.numel(), checksum)
            await self._put(call, pack_trailer(checksum))
            self.is_written = True
            if self._on_written is not None:
                self._on_written(self)
            await call.done_writing()
        except RPC_ERRORS:
            pass  # `_read` has the reason, or the verdict that made the receiver hang up
        finally:
            turn.end()

    def _borrow(self) -> int:
        """Bytes that may be sent unasked; `_give_back` when they have room, or are no more."""
        self._borrowed = min(_EAGER_BYTES, self._route.eager_bytes)
        self._route.eager_bytes -= self._borrowed
        return self._borrowed

    def _give_back(self) -> None:
        self._route.eager_bytes += self._borrowed
        self._borrowed = 0

    async def _put_chunks(
        self,
        call: aio.StreamStreamCall[bytes, bytes],
        raw: Tensor,
        place: int,
        until: int,
        checksum: int,
    ) -> int:
        """Send bytes `place` to `until`; returns the checksum with them."""
        while place < until:
            end = min(until, place + self._next_chunk_bytes())
            await self._pace(end - place)
            chunk = chunk_of(raw, place, end)
            checksum = zlib.crc32(chunk, checksum)
            await self._put(call, chunk)
            place = end
        return checksum

    async def _skip(self, raw: Tensor, offset: int) -> tuple[int, int]:
        """The checksum of what the receiver has already."""
        checksum, place = 0, 0
        while place < offset:
            end = min(offset, place + CHUNK_BYTES_MAX)
            checksum = zlib.crc32(chunk_of(raw, place, end), checksum)
            place = end
            await asyncio.sleep(0)
        return checksum, place

    def _next_chunk_bytes(self) -> int:
        piece = self._sender.line.piece_bytes(_PACED_PIECE_S)
        return max(_LEAST_CHUNK_BYTES // 4, int(min(self._chunk_bytes, piece)))

    async def _pace(self, num_bytes: int) -> None:
        """Wait for the line."""
        loop = asyncio.get_running_loop()
        if self._sender.line.rate is None or self._control:
            return
        when = self._sender.line.send(num_bytes, loop.time())
        patience_s = self._sender.keepalive_s / 4
        while (left := when - loop.time()) > 0:
            await asyncio.sleep(min(left, patience_s))
            if left > patience_s and self._watchdog is not None:
                self._watchdog.feed()  # so long a wait is our own, and no stall of the peer's

    async def _put(self, call: aio.StreamStreamCall[bytes, bytes], frame: bytes) -> None:
        """Write a frame; the next chunk is larger or smaller by how long that took."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        if self._control:
            self._sender.line.charge(len(frame), start)
        await call.write(frame)
        took_s = loop.time() - start
        self._sender.traffic.bytes_sent += len(frame)
        if took_s < _QUICK_S and len(frame) >= self._chunk_bytes:
            self._chunk_bytes = min(2 * self._chunk_bytes, CHUNK_BYTES_MAX)
        elif took_s > _SLOW_S:
            self._chunk_bytes = max(self._chunk_bytes // 2, _LEAST_CHUNK_BYTES)

    async def _withdraw(self, error: CommError) -> None:
        """Tell the receiver, for as long as a message would be tried."""
        taken = False
        try:
            taken = await self._ask_withdrawal()
        finally:
            if taken and not self._done.done():
                self._done.set_result(None)
            if not self._done.done():
                self._done.set_exception(error)

    async def _ask_withdrawal(self) -> bool:
        """Whether the receiver had taken the message before; no where it does not answer."""
        frame = pack_header(self.header)
        loop = asyncio.get_running_loop()
        until = loop.time() + self._sender.keepalive_s
        backoff = _BACKOFF_S
        while (left := until - loop.time()) > 0:
            channel = self._route.channel(True)
            if channel is None:
                return False
            try:
                method: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
                    f"/{SERVICE}/{WITHDRAW}"
                )
                return await method(frame, timeout=left) == TAKEN
            except aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
                    return False
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _BACKOFF_MAX_S)
        return False


def error_of(reason: Reason, message: str) -> CommError:
    """The error that a refusal is for both ends."""
    if reason in (Reason.CHECKSUM, Reason.NOT_FINITE):
        return PayloadCorrupt(message)
    return Refused(reason, message)


async def _hang_up(call: aio.StreamStreamCall[bytes, bytes]) -> None:
    """Let a stream whose verdict is known end by itself; cancelling it would be logged there."""
    await call.code()


def _describe(error: BaseException) -> str:
    if isinstance(error, aio.AioRpcError):
        return error.details() or error.code().name
    return str(error) or type(error).__name__


def _mark_read(future: asyncio.Future[None]) -> None:
    """A failure that nobody awaits is the method's decision, not a lost error."""
    if not future.cancelled():
        future.exception()
