"""What has come for this worker and what it waits for: the receiving half of the transport's rules.

Nothing here knows of sockets. A message is an `Entry` from its header on; the transport fills it
and says how that ended, the method takes it. Entries of taken messages stay until the next round,
so that a message that is sent again is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.cluster.limits import Limits
from gossamer.cluster.wire import Header, Reason, Refused, raw_bytes
from gossamer.comm.context import Tag
from gossamer.errors import (
    CommError,
    LinkFailed,
    OutOfSync,
    PayloadCorrupt,
    PeerLost,
    TimedOut,
    check,
)

Key = tuple[int, Tag]  # sender, tag

CONTROL_BYTES_MAX = 1 << 16
"""Exact messages up to this size never wait behind payload."""

_CONTROL_UNTAKEN = 16 << 20


@dataclass(eq=False, slots=True)
class Entry:
    """One message of another worker.

    Its state: "held" (its header is here, its bytes are left on the way), "flying", "arrived",
    "handed" (to a receiver that is about to run), "taken", "failed".
    """

    key: Key
    message_id: bytes
    sender_life: bytes
    num_bytes: int
    exact: bool
    dtype: torch.dtype
    shape: tuple[int, ...]
    state: str = "held"
    payload: Tensor | None = None
    raw: Tensor | None = None  # the payload's memory
    received: int = 0  # bytes of it that are there
    checksum: int = 0  # of these
    error: CommError | None = None  # why it will not come
    told: bool = False  # the receiver has had that error
    stop: Callable[[], None] | None = None  # ends the stream that fills it
    admitted: asyncio.Future[None] | None = None  # somebody waits for room
    expiry: asyncio.TimerHandle | None = None  # the stream broke; when to give it up

    @property
    def is_control(self) -> bool:
        """Whether it goes before payload."""
        return self.exact and self.num_bytes <= CONTROL_BYTES_MAX

    @property
    def in_flight(self) -> bool:
        """Whether more of it is to come."""
        return self.state in ("held", "flying")


class Inbox:
    """The mailbox of one worker."""

    def __init__(self, worker: int, limits: Limits) -> None:
        self._worker, self._limits = worker, limits
        self._entries: dict[Key, Entry] = {}
        self._waiting: dict[Key, asyncio.Future[Entry]] = {}
        self._waits_since: dict[Key, float] = {}
        self._closed: set[Key] = set()  # given up; membership tests only
        self._withdrawn: dict[Key, bytes] = {}  # ids of messages whose withdrawal came first
        self._lost: set[int] = set()  # workers known to be gone; membership tests only
        self._finished: set[int] = set()  # workers that send nothing new; membership tests only
        self._untaken: dict[tuple[int, bool], int] = {}  # bytes by sender and whether control
        self._counts: dict[int, int] = {}  # entries by sender
        self._round_index = 0
        self._closing = False

    # -------------------------------------------------------------------------- for the transport

    def offer(self, header: Header) -> Entry:
        """A message wants to come. Raises `Refused`; the entry's state says what is to be done.

        "held" or "flying": its payload is to be sent from `received` on. Other states: it has come
        already, and this is the sender's second attempt.
        """
        key = (header.sender, header.tag)
        if self._closing:
            raise Refused(Reason.CLOSING, f"worker {self._worker} is shutting down")
        if header.sender in self._lost:
            raise Refused(
                Reason.GONE, f"worker {self._worker} takes worker {header.sender} for gone"
            )
        entry = self._entries.get(key)
        if entry is not None and entry.message_id == header.message_id:
            return self._again(entry, header)
        if key in self._closed or header.tag.round_index < self._round_index:
            raise Refused(Reason.LATE, f"worker {self._worker} no longer waits for this message")
        if self._withdrawn.get(key) == header.message_id:
            raise Refused(Reason.WITHDRAWN, f"worker {header.sender} gave the transfer up")
        if entry is not None and entry.sender_life == header.sender_life:
            raise Refused(Reason.REPLAY, f"another message has this tag: {header.tag}")
        if entry is not None:  # of the sender's life before this one
            self._drop(entry, Refused(Reason.LIFE, f"worker {header.sender} started again"))
        if self._counts.get(header.sender, 0) >= self._limits.messages_max:
            raise Refused(Reason.CROWDED, f"too many messages in a round from {header.sender}")
        entry = Entry(
            key, header.message_id, header.sender_life, header.num_bytes,
            header.exact, header.dtype, header.shape,
        )  # fmt: skip
        self._entries[key] = entry
        self._counts[header.sender] = self._counts.get(header.sender, 0) + 1
        return entry

    def _again(self, entry: Entry, header: Header) -> Entry:
        if not header.retry:
            raise Refused(Reason.REPLAY, f"this message was sent before: {header.tag}")
        if entry.error is not None:
            raise refusal_of(entry)
        if entry.in_flight:
            self._unwatch(entry)
            if (stop := entry.stop) is not None:  # its old stream is not known to be dead yet
                entry.stop = None
                stop()
        return entry

    async def admit(self, entry: Entry, patience_s: float) -> bool:
        """Wait for room for a held entry, at most `patience_s`; whether there is."""
        if entry.state != "held":
            return True
        if self._has_room(entry):
            self._allocate(entry)
            return True
        mine = entry.admitted = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait([mine], timeout=patience_s)
        finally:
            if entry.admitted is mine:  # else the sender has opened another stream for it
                entry.admitted = None
        return entry.state != "held"

    def _has_room(self, entry: Entry) -> bool:
        untaken = self._untaken.get((entry.key[0], entry.is_control), 0)
        most = _CONTROL_UNTAKEN if entry.is_control else self._limits.untaken_bytes
        fits = untaken == 0 or untaken + entry.num_bytes <= most
        return fits or entry.key in self._waiting

    def _allocate(self, entry: Entry) -> None:
        try:
            payload = torch.empty(entry.shape, dtype=entry.dtype)
        except RuntimeError as error:
            refused = Refused(Reason.SIZE, f"no memory for {entry.num_bytes} bytes: {error}")
            self.fail(entry, refused)
            raise refused from None
        entry.payload, entry.raw = payload, raw_bytes(payload)
        entry.state = "flying"
        whose = (entry.key[0], entry.is_control)
        self._untaken[whose] = self._untaken.get(whose, 0) + entry.num_bytes
        if entry.admitted is not None and not entry.admitted.done():
            entry.admitted.set_result(None)

    def _let_in(self) -> None:
        """Admit what has room now."""
        for entry in list(self._entries.values()):
            if entry.state == "held" and entry.admitted is not None and self._has_room(entry):
                self._allocate(entry)

    def complete(self, entry: Entry) -> None:
        """The payload is there. Raises `Refused` where nobody wants it any more."""
        if not entry.in_flight:
            raise refusal_of(entry)
        entry.state, entry.stop = "arrived", None
        waiter = self._waiting.pop(entry.key, None)
        if waiter is not None and not waiter.done():
            entry.state = "handed"
            waiter.set_result(entry)
        self._wake_left_behind(entry.key[0])

    def _gone_on(self, key: Key) -> bool:
        """Whether the sender is done with what is waited for: it will never send it.

        It has sent something later of the same kind, or has ended; and it finishes what it sends
        for a round before it begins the next.
        """
        src, tag = key
        entry = self._entries.get(key)
        if entry is not None and entry.in_flight:
            return False
        return src in self._finished or any(
            sender == src
            and other.kind == tag.kind
            and (other.round_index, other.step) > (tag.round_index, tag.step)
            and (later.state == "arrived" or (later.state == "failed" and not later.told))
            for (sender, other), later in self._entries.items()
        )

    def _wake_left_behind(self, src: int) -> None:
        """Tell who waits for what `src` will never send."""
        for key in [k for k in self._waiting if k[0] == src and self._gone_on(k)]:
            waiter = self._waiting.pop(key)
            self._closed.add(key)
            if not waiter.done():
                waiter.set_exception(_passed(src))

    def peer_finished(self, worker: int) -> None:
        """The worker has done its last round: it sends nothing more than what is on its way."""
        self._finished.add(worker)
        self._wake_left_behind(worker)

    def fail(self, entry: Entry, error: CommError) -> None:
        """The message will not come, or must not be taken: tell the receiver, end the stream."""
        if entry.state not in ("held", "flying", "arrived"):
            return
        self._release(entry)
        self._unwatch(entry)
        entry.state, entry.error = "failed", error
        if entry.admitted is not None and not entry.admitted.done():
            entry.admitted.set_result(None)
        if (stop := entry.stop) is not None:
            entry.stop = None
            stop()
        waiter = self._waiting.pop(entry.key, None)
        if waiter is not None and not waiter.done():
            entry.state = "handed"
            waiter.set_result(entry)

    def broken(self, entry: Entry, patience_s: float) -> None:
        """The stream broke; the sender may try again within `patience_s`."""
        entry.stop = None
        if entry.in_flight:
            loop = asyncio.get_running_loop()
            sender = entry.key[0]
            error = LinkFailed(f"the connection from worker {sender} broke and did not come back")
            entry.expiry = loop.call_later(patience_s, self.fail, entry, error)

    def withdraw(self, header: Header) -> bool:
        """The sender gives a message up; what was not yet taken never will be.

        Returns whether it was taken before.
        """
        key = (header.sender, header.tag)
        error = Refused(Reason.WITHDRAWN, f"worker {header.sender} gave the transfer up")
        entry = self._entries.get(key)
        if entry is not None:
            same = entry.message_id == header.message_id
            if same:
                self.fail(entry, error)
            return same and entry.error is None
        if header.tag.round_index < self._round_index or key in self._closed:
            return False
        if len(self._withdrawn) < self._limits.messages_max:
            self._withdrawn[key] = header.message_id
        waiter = self._waiting.pop(key, None)
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        return False

    def _unwatch(self, entry: Entry) -> None:
        if entry.expiry is not None:
            entry.expiry.cancel()
            entry.expiry = None

    def _release(self, entry: Entry) -> None:
        """Forget the payload, and let others use its room."""
        held = entry.payload is not None
        entry.payload = entry.raw = None
        if held:
            self._untaken[entry.key[0], entry.is_control] -= entry.num_bytes
            self._let_in()

    def _drop(self, entry: Entry, error: CommError) -> None:
        """Forget an entry altogether."""
        self.fail(entry, error)
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self._counts[entry.key[0]] -= 1

    # ----------------------------------------------------------------------------- for the method

    async def recv(self, src: int, tag: Tag, timeout_s: float) -> Tensor:
        """See `Transport.recv`."""
        key = (src, tag)
        entry = self._entries.get(key)
        if entry is None or entry.state not in ("arrived", "failed") or entry.told:
            if src in self._lost:
                self._closed.add(key)
                raise PeerLost(f"worker {src} is gone")
            if self._gone_on(key):
                self._closed.add(key)
                raise _passed(src)
            entry = await self._wait(key, timeout_s)
        if entry.error is not None:
            entry.state, entry.told = "failed", True
            raise entry.error
        payload = entry.payload
        check(payload is not None, "a message that has arrived has a payload")
        entry.state = "taken"
        self._release(entry)
        assert payload is not None
        return payload

    async def _wait(self, key: Key, timeout_s: float) -> Entry:
        check(key not in self._waiting, f"two tasks wait for the same message: {key}")
        check(not self._closing, "a transport that is closed receives nothing")
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Entry] = loop.create_future()
        self._waiting[key] = waiter
        self._waits_since[key] = loop.time()
        timer: asyncio.TimerHandle | None = None

        def expire() -> None:
            nonlocal timer
            if waiter.done():
                return
            entry = self._entries.get(key)
            if entry is not None and entry.in_flight:
                timer = loop.call_later(timeout_s, expire)  # it moves, or fails by itself
                return
            self._closed.add(key)
            waiter.set_exception(TimedOut(f"nothing from worker {key[0]} within {timeout_s:g} s"))

        timer = loop.call_later(timeout_s, expire)
        self._let_in()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                entry = waiter.result()  # it came in the instant of the cancellation: keep it
                entry.state = "arrived" if entry.error is None else "failed"
            raise
        finally:
            timer.cancel()
            del self._waits_since[key]
            if self._waiting.get(key) is waiter:
                del self._waiting[key]

    def forsake(self, is_forsaken: Callable[[int, Tag], bool], error: CommError) -> None:
        """Wait no longer for what is called so, by sender and tag; tell who waited."""
        for key in [k for k in self._waiting if is_forsaken(*k)]:
            waiter = self._waiting.pop(key)
            self._closed.add(key)
            if not waiter.done():
                waiter.set_exception(error)

    @property
    def awaited(self) -> list[int]:
        """Workers of whom a message is awaited that has not begun to come."""
        return sorted({key[0] for key in self._waiting if not self._is_coming(key)})

    def cut_off(self, src: int, since: float) -> None:
        """Nothing gets through from this worker: who has waited since then is told."""
        lost = LinkFailed(f"the link to worker {src} lets nothing through")
        for key in [k for k in self._waiting if k[0] == src and not self._is_coming(k)]:
            if self._waits_since[key] <= since:
                self._closed.add(key)
                waiter = self._waiting.pop(key)
                if not waiter.done():
                    waiter.set_exception(lost)

    def _is_coming(self, key: Key) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.in_flight

    def begin_round(self, round_index: int) -> None:
        """See `Transport.begin_round`."""
        self._round_index = round_index
        late = Refused(Reason.LATE, f"worker {self._worker} has begun round {round_index}")
        for entry in [e for k, e in self._entries.items() if k[1].round_index < round_index]:
            self._drop(entry, late)
        self._closed = {k for k in self._closed if k[1].round_index >= round_index}
        self._withdrawn = {
            k: v for k, v in self._withdrawn.items() if k[1].round_index >= round_index
        }

    def peer_lost(self, worker: int) -> None:
        """See `Transport.peer_lost`."""
        self._lost.add(worker)
        lost = PeerLost(f"worker {worker} is gone")
        self.forsake(lambda src, tag: src == worker, lost)
        for entry in [e for k, e in self._entries.items() if k[0] == worker and e.in_flight]:
            self.fail(entry, lost)

    def peer_back(self, worker: int) -> None:
        """See `Transport.peer_back`."""
        self._lost.discard(worker)
        self._finished.discard(worker)

    def is_lost(self, worker: int) -> bool:
        """Whether the worker is known to be gone."""
        return worker in self._lost

    def close(self) -> None:
        """Refuse everything from now on, and fail what waits."""
        self._closing = True
        error = Refused(Reason.CLOSING, f"worker {self._worker} is shutting down")
        for entry in list(self._entries.values()):
            self._drop(entry, error)
        for waiter in list(self._waiting.values()):
            if not waiter.done():
                waiter.set_exception(error)
        self._waiting.clear()

    def knows_of(self, src: int, tag: Tag) -> bool:
        """Whether some of a message has come that is still to be taken."""
        entry = self._entries.get((src, tag))
        return entry is not None and (entry.received > 0 or entry.state == "arrived")

    def untaken_bytes(self, worker: int) -> int:
        """Bytes of the worker's messages that lie here."""
        return self._untaken.get((worker, False), 0) + self._untaken.get((worker, True), 0)


def _passed(src: int) -> OutOfSync:
    return OutOfSync(f"worker {src} has gone on without this worker")


def refusal_of(entry: Entry) -> Refused:
    """Why an entry is not wanted, for its sender."""
    error = entry.error
    if isinstance(error, Refused):
        return error
    reason = Reason.SLOW
    if isinstance(error, PeerLost):
        reason = Reason.GONE
    elif isinstance(error, PayloadCorrupt):
        reason = Reason.CHECKSUM
    return Refused(reason, str(error) if error else "given up")
