"""The server's side of one message: check, wait for room, fill, decide."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from typing import Any, Protocol

import numpy as np
from grpc import aio
from numpy.typing import NDArray
from torch import Tensor

from gossamer.cluster.certs import place_name
from gossamer.cluster.inbox import Entry, refusal_of
from gossamer.cluster.limits import Limits
from gossamer.cluster.outbox import RPC_ERRORS, TAKEN, WAITS, WITHDRAWN, Traffic, error_of
from gossamer.cluster.pacing import Line, Watchdog
from gossamer.cluster.wire import (
    CHUNK_BYTES_MAX,
    NO_LIFE,
    ORDINARY,
    Header,
    Reason,
    Refused,
    Reply,
    check_trailer,
    is_finite_chunk,
    pack_reply,
    parse_header,
)
from gossamer.errors import CommError

_log = logging.getLogger(__name__)
_PROGRESS_S = 0.2  # how often a sender hears of progress
_WARNINGS_MAX = 1000  # different ones in a process's life
_STREAMS_SLACK = 64

Context = aio.ServicerContext[bytes, bytes]


class Box(Protocol):
    """Where messages or letters come in; see `Inbox` and `Mailbox`."""

    def offer(self, header: Header) -> Entry:
        """One wants to come. Raises `Refused`; the entry's state says what is to be done."""

    async def admit(self, entry: Entry, patience_s: float) -> bool:
        """Wait for room, at most `patience_s`; whether there is."""

    def complete(self, entry: Entry) -> None:
        """It is there. Raises `Refused` where nobody wants it any more."""

    def fail(self, entry: Entry, error: CommError) -> None:
        """It will not come."""

    def broken(self, entry: Entry, patience_s: float) -> None:
        """Its stream broke; the sender may try again within `patience_s`."""

    def withdraw(self, header: Header) -> bool:
        """The sender gives it up. Whether it was taken before."""


class _Stream:
    """The task that serves one message, which the inbox may end."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True
        self.task.cancel()


class Receiver:
    """Serves the messages that others send to one worker."""

    def __init__(
        self,
        worker: int,
        run_id: str,
        life: bytes,
        *,
        limits: Limits,
        inbox: Box,
        mailbox: Box,
        line: Line,
        delay_s: float,
        traffic: Traffic,
        secure: bool,
        num_workers: int | None,
    ) -> None:
        self._worker, self._run_id, self._life = worker, run_id, life
        self._limits, self._line, self._num_workers = limits, line, num_workers
        self._inbox, self._mailbox = inbox, mailbox
        self._delay_s, self._traffic, self._secure = delay_s, traffic, secure
        self._streams: dict[int, int] = {}  # by sender
        self._warned: set[tuple[Reason, str]] = set()  # membership tests only

    # ------------------------------------------------------------------------------------- streams

    async def message(self, _: Any, context: Context) -> None:
        """The handler of one message's stream."""
        stream = _Stream()
        entry: Entry | None = None
        sender, box = -1, self._inbox
        try:
            try:
                header = await self._header(context)
                sender = header.sender
                self._streams[sender] = self._streams.get(sender, 0) + 1
                if self._streams[sender] > 2 * (self._limits.streams_max + _STREAMS_SLACK):
                    raise Refused(Reason.CROWDED, "too many messages at a time")
                box = self._box_of(header)
                entry = box.offer(header)
                if entry.in_flight:
                    entry.stop = stream.stop
                    await self._take(box, entry, context)
                await self._reply(context, Reply("accepted"))
            except Refused as refused:
                await self._refuse(context, box, entry, stream, refused)
            except asyncio.CancelledError:
                if not stream.stopped or entry is None:
                    raise
                stream.task.uncancel()
                if entry.error is not None:  # else the sender has opened another stream for it
                    await self._refuse(context, box, entry, stream, refusal_of(entry))
        except (asyncio.CancelledError, *RPC_ERRORS) as error:
            if entry is not None and entry.stop == stream.stop:
                box.broken(entry, self._limits.keepalive)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            if sender >= 0:
                self._streams[sender] -= 1

    async def withdraw(self, request: bytes, context: Context) -> bytes:
        """The handler of a withdrawal."""
        try:
            header = self._checked(request, context)
        except Refused as refused:
            self._note(refused, context)
            return WITHDRAWN
        self._traffic.bytes_received += len(request)
        return TAKEN if self._box_of(header).withdraw(header) else WITHDRAWN

    def _box_of(self, header: Header) -> Box:
        return self._inbox if header.note is None else self._mailbox

    async def _header(self, context: Context) -> Header:
        try:
            async with asyncio.timeout(self._limits.header_timeout):
                frame = await context.read()
        except TimeoutError:
            raise Refused(Reason.SLOW, "no header in time") from None
        if not isinstance(frame, bytes):
            if context.cancelled():
                raise Refused(Reason.WITHDRAWN, "its sender gave it up before it was sent")
            raise Refused(Reason.TRUNCATED, "the stream ended before its header")
        self._traffic.bytes_received += len(frame)
        return self._checked(frame, context)

    def _checked(self, frame: bytes, context: Context) -> Header:
        """A header that may be served. Raises `Refused`."""
        header = parse_header(frame)
        if header.run_id != self._run_id:
            raise Refused(
                Reason.RUN, f"run {header.run_id!r} meets run {self._run_id!r}; one of them is old"
            )
        name = self._name(context)
        if self._secure and name != place_name(header.sender, self._num_workers):
            raise Refused(Reason.IDENTITY, f"{name!r} sent as worker {header.sender}")
        if header.receiver != self._worker or header.sender == self._worker:
            raise Refused(
                Reason.IDENTITY,
                f"a message from worker {header.sender} to worker {header.receiver} reached "
                f"worker {self._worker}; are the addresses right?",
            )
        if header.num_bytes > self._limits.payload_max:
            raise Refused(
                Reason.SIZE,
                f"{header.num_bytes} bytes; at most {self._limits.payload_max:.0f} are taken",
            )
        if header.receiver_life not in (NO_LIFE, self._life):
            raise Refused(Reason.LIFE, f"worker {self._worker} has started again")
        return header

    async def _take(self, box: Box, entry: Entry, context: Context) -> None:
        """Receive the rest of a payload and hand it over."""
        patience_s = 0.0  # who must wait hears of it at once: others can be sent meanwhile
        while not await box.admit(entry, patience_s):
            await self._reply(context, Reply("progress", entry.received))
            patience_s = self._limits.keepalive / 4
        if entry.error is not None:
            raise refusal_of(entry)
        await self._reply(context, Reply("go", entry.received, self._life))
        stalled = Refused(Reason.SLOW, f"nothing came for {self._limits.keepalive:g} s")
        dog = Watchdog(self._limits.keepalive, lambda: box.fail(entry, stalled))
        try:
            await self._fill(entry, context, dog)
            trailer = await context.read()
        finally:
            dog.stop()
        if not isinstance(trailer, bytes):
            raise Refused(Reason.TRUNCATED, "the stream ended before its checksum")
        self._traffic.bytes_received += len(trailer)
        check_trailer(trailer, entry.checksum)
        await asyncio.sleep(self._delay_s)
        box.complete(entry)
        self._traffic.taken_in += 1

    async def _fill(self, entry: Entry, context: Context, dog: Watchdog) -> None:
        """Chunks into the payload's memory."""
        raw = entry.raw
        assert raw is not None
        memory = raw.numpy()
        loop = asyncio.get_running_loop()
        told_at = float("-inf")
        while entry.received < entry.num_bytes:
            chunk = await context.read()
            if not isinstance(chunk, bytes):
                raise Refused(Reason.TRUNCATED, f"{entry.received} of {entry.num_bytes} bytes")
            if chunk != WAITS:
                await self._put(entry, raw, memory, chunk)
            dog.feed()
            if loop.time() - told_at >= _PROGRESS_S:
                told_at = loop.time()
                await self._reply(context, Reply("progress", entry.received))

    async def _put(
        self, entry: Entry, raw: Tensor, memory: NDArray[np.uint8], chunk: bytes
    ) -> None:
        """One chunk to its place, checked."""
        start, end = entry.received, entry.received + len(chunk)
        if len(chunk) > CHUNK_BYTES_MAX or end > entry.num_bytes:
            raise Refused(Reason.SIZE, f"a chunk of {len(chunk)} bytes at {start}")
        memory[start:end] = np.frombuffer(chunk, np.uint8)
        if not entry.exact and not is_finite_chunk(raw, start, end, entry.dtype):
            raise Refused(Reason.NOT_FINITE, "the payload holds NaN or infinity")
        entry.checksum = zlib.crc32(chunk, entry.checksum)
        entry.received = end
        self._traffic.bytes_received += len(chunk)
        loop = asyncio.get_running_loop()
        if (wait_s := self._line.receive(len(chunk), loop.time()) - loop.time()) > 0:
            await asyncio.sleep(wait_s)

    # ------------------------------------------------------------------------------------- answers

    async def _reply(self, context: Context, reply: Reply) -> None:
        frame = pack_reply(reply)
        self._traffic.bytes_sent += len(frame)
        await context.write(frame)

    async def _refuse(
        self,
        context: Context,
        box: Box,
        entry: Entry | None,
        stream: _Stream,
        refused: Refused,
    ) -> None:
        """Tell both ends, and whoever reads the log once."""
        self._note(refused, context)
        if entry is not None and entry.stop == stream.stop:
            entry.stop = None
            if refused.reason is Reason.TRUNCATED:  # so a connection that breaks looks as well
                box.broken(entry, self._limits.keepalive)
            else:
                box.fail(entry, error_of(refused.reason, str(refused)))
        await self._reply(context, Reply("refused", reason=refused.reason, text=str(refused)))
        # A stream that ends while its sender writes shows there as an error and hides the verdict:
        # give it a moment to read that and hang up.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.keepalive / 4):
                while isinstance(await context.read(), bytes):
                    pass

    def _note(self, refused: Refused, context: Context) -> None:
        kind = refused.reason.name.lower()
        self._traffic.refused[kind] = self._traffic.refused.get(kind, 0) + 1
        if refused.reason in ORDINARY:
            return
        peer = self._name(context) or context.peer().rpartition(":")[0]
        if (refused.reason, peer) not in self._warned and len(self._warned) < _WARNINGS_MAX:
            self._warned.add((refused.reason, peer))
            _log.warning(
                "worker %d refused a message of %s: %s (%s; said once)",
                self._worker, peer, refused, kind,
            )  # fmt: skip

    def _name(self, context: Context) -> str:
        """The common name of the peer's certificate; empty without one."""
        names = context.auth_context().get("x509_common_name", ())
        return next(iter(names), b"").decode(errors="replace")
