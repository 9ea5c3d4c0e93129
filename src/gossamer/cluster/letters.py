"""Letters over gRPC: the mailbox of one process, and what it has on its way to others.

See `gossamer.comm.letters` for the rules. On the wire a letter is a message whose header has a
note; checks, chunks and checksum are the same. A stream that breaks takes what had come of its
letter with it, and the sender begins anew for as long as it would try a message.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.cluster.inbox import CONTROL_BYTES_MAX, Entry, refusal_of
from gossamer.cluster.limits import Limits
from gossamer.cluster.outbox import Sending
from gossamer.cluster.wire import ID_BYTES, Header, Reason, Refused, raw_bytes
from gossamer.comm.context import Tag
from gossamer.comm.letters import Letter
from gossamer.errors import CommError, LinkFailed, PeerLost, check

Key = tuple[int, str, int]  # sender (or receiver), kind, part

_KEYS_MAX = 4096  # kinds and parts of one sender


@dataclass(eq=False, slots=True)
class _Coming(Entry):
    """A letter of which not all is there."""

    note: tuple[int, ...] = ()


@dataclass(slots=True)
class _Sender:
    """What is known of another process's letters."""

    life: bytes
    former: bytes = b""  # the life before
    newest: dict[tuple[str, int], int] = field(default_factory=dict)  # by kind, part: step


class Mailbox:
    """What has come for one process; fills entries as `Inbox` does."""

    def __init__(self, worker: int, limits: Limits) -> None:
        self._worker, self._limits = worker, limits
        self._arrived: dict[Key, Letter] = {}
        self._coming: dict[bytes, _Coming] = {}  # by the letter's id
        self._senders: dict[int, _Sender] = {}
        self._lost: set[int] = set()  # membership tests only
        self._news = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._closing = False

    # -------------------------------------------------------------------------- for the transport

    def offer(self, header: Header) -> Entry:
        """A letter wants to come. Raises `Refused`; one that has come already is "taken"."""
        sender, tag = header.sender, header.tag
        if self._closing:
            raise Refused(Reason.CLOSING, f"worker {self._worker} is shutting down")
        if sender in self._lost:
            raise Refused(Reason.GONE, f"worker {self._worker} takes worker {sender} for gone")
        newest = self._sender(header).newest
        entry = _Coming(
            (sender, tag), header.message_id, header.sender_life, header.num_bytes,
            header.exact, header.dtype, header.shape, note=header.note or (),
        )  # fmt: skip
        had = newest.get((tag.kind, tag.part), -1)
        if tag.step == had:
            entry.state = "taken"
            return entry
        if tag.step < had:
            raise self._late()
        if (other := self._coming.get(header.message_id)) is not None:
            self.fail(other, Refused(Reason.WITHDRAWN, f"worker {sender} sends it anew"))
        if len(newest) >= _KEYS_MAX and (tag.kind, tag.part) not in newest:
            raise Refused(Reason.CROWDED, f"too many kinds of letters from worker {sender}")
        untaken = self.untaken_bytes(sender)
        if untaken and untaken + header.num_bytes > self._limits.untaken_bytes:
            raise Refused(Reason.CROWDED, f"too many untaken letters from worker {sender}")
        self._coming[header.message_id] = entry
        return entry

    def _late(self) -> Refused:
        return Refused(Reason.LATE, f"worker {self._worker} has a newer letter")

    def _sender(self, header: Header) -> _Sender:
        """What is known of the sender; a new process counts from the beginning."""
        known = self._senders.get(header.sender)
        if known is None or header.sender_life not in (known.life, known.former):
            former = b"" if known is None else known.life
            known = self._senders[header.sender] = _Sender(header.sender_life, former)
        elif header.sender_life == known.former:
            raise Refused(Reason.LIFE, f"worker {header.sender} has started again")
        return known

    def untaken_bytes(self, sender: int) -> int:
        """Bytes of a sender's letters that lie here, or are about to."""
        arrived = sum(
            letter.payload.nbytes for key, letter in self._arrived.items() if key[0] == sender
        )
        return arrived + sum(e.num_bytes for e in self._coming.values() if e.key[0] == sender)

    async def admit(self, entry: Entry, patience_s: float) -> bool:
        """Make room for it."""
        if entry.state == "held":
            try:
                entry.payload = torch.empty(entry.shape, dtype=entry.dtype)
            except RuntimeError as error:
                refused = Refused(Reason.SIZE, f"no memory for {entry.num_bytes} bytes: {error}")
                self.fail(entry, refused)
                raise refused from None
            entry.raw, entry.state = raw_bytes(entry.payload), "flying"
        return True

    def complete(self, entry: Entry) -> None:
        """It is there. Raises `Refused` where it is not wanted any more."""
        if not entry.in_flight or not isinstance(entry, _Coming):
            raise refusal_of(entry)
        payload, key, newest = entry.payload, _key(entry), self._senders[entry.key[0]].newest
        if _step(entry) <= newest.get(key[1:], -1):
            self._forget(entry)
            raise self._late()
        check(payload is not None, "a letter that has arrived has a payload")
        assert payload is not None
        self._forget(entry)
        entry.state, entry.stop = "taken", None
        self._arrived[key] = Letter(key[0], _step(entry), entry.note, payload)
        newest[key[1:]] = _step(entry)
        self.tell()

    def fail(self, entry: Entry, error: CommError) -> None:
        """It will not come."""
        if not entry.in_flight:
            return
        self._forget(entry)
        entry.state, entry.error = "failed", error
        if (stop := entry.stop) is not None:
            entry.stop = None
            stop()

    def broken(self, entry: Entry, patience_s: float) -> None:
        """Its stream broke."""
        entry.stop = None
        self.fail(entry, LinkFailed(f"the connection from worker {entry.key[0]} broke"))

    def withdraw(self, header: Header) -> bool:
        """Letters end with their streams, and are not withdrawn."""
        return False

    def _forget(self, entry: Entry) -> None:
        entry.payload = entry.raw = None
        if self._coming.get(entry.message_id) is entry:
            del self._coming[entry.message_id]

    def peer_lost(self, worker: int) -> None:
        """A process is gone; what had come of it stays."""
        self._lost.add(worker)
        for entry in [e for e in self._coming.values() if e.key[0] == worker]:
            self.fail(entry, PeerLost(f"worker {worker} is gone"))
        self.tell()

    def peer_back(self, worker: int) -> None:
        """It is back, perhaps in the same process, and counts from the beginning."""
        self._lost.discard(worker)
        if worker in self._senders:
            self._senders[worker].newest.clear()
        self.tell()

    def begin(self) -> None:
        """This process takes part anew: what has come was for its part before."""
        for entry in list(self._coming.values()):
            self.fail(entry, Refused(Reason.LATE, f"worker {self._worker} has begun anew"))
        self._arrived.clear()
        for sender in self._senders.values():
            sender.newest.clear()

    def close(self) -> None:
        """Refuse everything from now on."""
        self._closing = True
        closing = Refused(Reason.CLOSING, f"worker {self._worker} is shutting down")
        for entry in list(self._coming.values()):
            self.fail(entry, closing)

    # ----------------------------------------------------------------------------- for the method

    def poll(self, src: int, kind: str, part: int) -> Letter | None:
        """See `LetterContext.poll`."""
        return self._arrived.pop((src, kind, part), None)

    def tell(self) -> None:
        """There is news."""
        self._news += 1
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def mail(self, seen: int, timeout_s: float | None) -> int:
        """See `LetterContext.mail`."""
        if self._news <= seen and (timeout_s is None or timeout_s > 0):
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await asyncio.wait([waiter], timeout=timeout_s)
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
        return self._news


class Letters:
    """The letters of one process on their way to others.

    Small ones (control) that have begun to leave are not taken back: they cost the line nothing,
    and where they are posted faster than one can leave, none would ever arrive. The newest waits
    until the one before it has left.

    Args:
        start: begins a transfer, from header, payload and whether it goes before payload.
    """

    def __init__(
        self,
        worker: int,
        run_id: str,
        life: bytes,
        start: Callable[[Header, Tensor, bool], Sending],
    ) -> None:
        self._worker, self._run_id, self._life, self._start = worker, run_id, life, start
        self._sendings: dict[Sending, None] = {}
        self._waiting: dict[Key, tuple[Header, Tensor]] = {}  # by receiver, kind, part

    def post(
        self,
        dst: int,
        kind: str,
        payload: Tensor,
        *,
        step: int,
        part: int,
        note: tuple[int, ...],
        exact: bool,
    ) -> None:
        """Send a letter, in place of an older one that has not left."""
        header = Header(
            run_id=self._run_id, sender=self._worker, receiver=dst,
            tag=Tag(kind, 0, step=step, part=part), dtype=payload.dtype, shape=tuple(payload.shape),
            exact=exact, message_id=os.urandom(ID_BYTES), sender_life=self._life, note=note,
        )  # fmt: skip
        address = (dst, kind, part)
        leaving = self._leaving(address)
        if leaving and self._is_small(header):
            self._waiting[address] = header, payload
            return
        self._waiting.pop(address, None)
        for older in leaving:
            older.abandon(LinkFailed("a newer letter goes in its place"))
        self._begin(header, payload)

    def _leaving(self, address: Key) -> list[Sending]:
        """Those that have begun to leave, and not all of which has been handed over."""
        return [s for s in self._sendings if _address(s.header) == address and not s.is_written]

    @staticmethod
    def _is_small(header: Header) -> bool:
        return header.exact and header.num_bytes <= CONTROL_BYTES_MAX

    def _begin(self, header: Header, payload: Tensor) -> None:
        sending = self._start(header, payload, self._is_small(header))
        self._sendings[sending] = None
        sending.when_written(self._send_waiting)
        sending.when_done(self._forget)

    def _forget(self, sending: Sending) -> None:
        self._sendings.pop(sending, None)
        self._send_waiting(sending)

    def _send_waiting(self, before: Sending) -> None:
        """What waited for a letter that has left, or will not."""
        address = _address(before.header)
        if address in self._waiting and not self._leaving(address):
            self._begin(*self._waiting.pop(address))

    def on_their_way(self, dst: int | None = None) -> int:
        """How many letters have not arrived or failed; to one process or to all.

        One that waits to go follows another, so there is none where this is zero.
        """
        return sum(dst in (None, sending.header.receiver) for sending in self._sendings)

    def abandon(self, error: CommError, dst: int | None = None) -> None:
        """Give up what is on its way or waits to go, to one process or to all."""
        for address in [a for a in self._waiting if dst in (None, a[0])]:
            del self._waiting[address]
        for sending in list(self._sendings):
            if dst in (None, sending.header.receiver):
                sending.abandon(error)


def _key(entry: Entry) -> Key:
    sender, tag = entry.key
    return sender, tag.kind, tag.part


def _step(entry: Entry) -> int:
    return entry.key[1].step


def _address(header: Header) -> Key:
    return header.receiver, header.tag.kind, header.tag.part
