"""Messages between simulated workers: mailboxes, acknowledgements, and who broke the rules.

Delivery copies the payload and compares a digest taken at `send`: a payload that was written to on
its way would have been a data race between real machines, and raises here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.comm.collectives import is_finite
from gossamer.comm.context import Tag
from gossamer.errors import (
    CommError,
    DataRace,
    LinkFailed,
    OutOfSync,
    PayloadCorrupt,
    PeerLost,
    TimedOut,
)
from gossamer.sim.clock import VirtualLoop, to_ns
from gossamer.sim.network import Flow, SimNetwork

Key = tuple[int, Tag]  # sender, tag


def of_earlier_round(tag: Tag, round_index: int) -> bool:
    """Whether a message was sent before its sender passed the boundary before `round_index`."""
    if tag.kind == "join":  # a donor hands its state over just after it has passed
        return tag.round_index <= round_index
    return tag.round_index < round_index


def flow_to_json(flow: Flow) -> dict[str, Any]:
    """What a flow is, without its progress."""
    return {
        "src": flow.src,
        "dst": flow.dst,
        "num_bytes": flow.num_bytes,
        "tag": flow.tag._asdict(),
        "control": flow.control,
        "subject_to_failure": flow.subject_to_failure,
    }


def flow_from_json(saved: dict[str, Any]) -> Flow:
    """A new flow whose payload nobody waits for."""
    fields = dict(saved)
    tag = Tag(**fields.pop("tag"))
    return Flow(tag=tag, on_done=lambda flow, error: None, **fields)


def digest(payload: Tensor) -> int:
    """A number that changes when the payload does; 0 for tensors without storage."""
    if payload.is_meta or payload.numel() == 0:
        return 0
    raw = payload.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = raw.size - raw.size % 8
    words = np.add.reduce(raw[:whole].view(np.uint64), dtype=np.uint64)
    return int(words) ^ int(np.add.reduce(raw[whole:], dtype=np.uint64))


@dataclass(eq=False, slots=True)
class Message:
    """One payload on its way, waiting in a mailbox, or taken."""

    src: int
    dst: int
    tag: Tag
    payload: Tensor
    exact: bool
    digest: int
    post: Post
    flow: Flow
    ack: asyncio.Future[None] | None = None
    error: CommError | None = None
    state: str = "flying"  # "flying", "arrived", "taken", "failed"

    async def delivered(self) -> None:
        if self.state == "failed":
            assert self.error is not None
            raise self.error
        if self.ack is None:
            self.ack = self.post.loop.create_future()
            if self.state != "flying":
                self.ack.set_result(None)
        await self.ack

    def cancel(self) -> None:
        self.post.withdraw(self)


@dataclass(slots=True)
class Mailbox:
    """What has come for one worker, and what it waits for."""

    arrived: dict[Key, Message] = field(default_factory=dict)
    waiting: dict[Key, asyncio.Future[Message]] = field(default_factory=dict)
    closed: set[Key] = field(default_factory=set)  # given up; membership tests only
    round_index: int = 0  # messages of earlier rounds are refused


def _passed(src: int) -> OutOfSync:
    return OutOfSync(f"worker {src} has gone on without this worker")


class Post:
    """The message service of a simulated world."""

    def __init__(
        self,
        loop: VirtualLoop,
        network: SimNetwork,
        num_workers: int,
        latency_ns: Callable[[int, int], int],
    ) -> None:
        self.loop, self.network = loop, network
        self._latency_ns = latency_ns
        self._boxes = [Mailbox() for _ in range(num_workers)]
        self._flying: dict[tuple[int, int, Tag], Message] = {}
        self._alive = [True] * num_workers
        self._finished = [False] * num_workers
        self._logs: dict[int, dict[str, list[dict[str, Any]]]] = {}  # by round of an open cut

    def start_log(self, round_index: int) -> None:
        """Note the transfers of earlier rounds that start or are given up from now on."""
        self._logs[round_index] = {"started": [], "cancelled": []}

    def take_log(self, round_index: int) -> dict[str, list[dict[str, Any]]]:
        """What was noted since `start_log`; and stop."""
        return self._logs.pop(round_index)

    def _note(self, what: str, flow: Flow) -> None:
        for round_index, log in self._logs.items():
            if of_earlier_round(flow.tag, round_index):
                log[what].append({"time_ns": self.loop.time_ns(), "flow": flow_to_json(flow)})

    def send(
        self, src: int, dst: int, tag: Tag, payload: Tensor, *, num_bytes: int, exact: bool
    ) -> Message:
        """Start a transfer of `num_bytes` on the network."""
        flow = Flow(src=src, dst=dst, num_bytes=num_bytes, tag=tag, on_done=self._arrive)
        flow.control = exact
        flow.subject_to_failure = not exact
        fingerprint = 0 if exact else digest(payload)
        message = Message(src, dst, tag, payload, exact, fingerprint, self, flow)
        self._flying[(dst, src, tag)] = message
        if self._alive[dst]:
            self.network.start(flow)
            self._note("started", flow)
        else:
            refused = PeerLost(f"worker {dst} is gone")
            self._after_latency(flow, lambda: self._arrive(flow, refused))
        return message

    def _after_latency(self, flow: Flow, action: Callable[[], None]) -> None:
        delay = max(1, self._latency_ns(flow.src, flow.dst))
        self.loop.call_at_ns(self.loop.time_ns() + delay, action)

    def _arrive(self, flow: Flow, error: CommError | None) -> None:
        """The network is done with a flow: hand the payload over, or tell both ends."""
        message = self._flying.pop((flow.dst, flow.src, flow.tag), None)
        if message is None or message.state != "flying":
            return
        if not message.exact and digest(message.payload) != message.digest:
            raise DataRace(
                f"worker {message.src} wrote to a payload on its way to worker {message.dst} "
                f"({message.tag}); send a copy, or wait for `delivered()` first"
            )
        box = self._boxes[flow.dst]
        key = (flow.src, flow.tag)
        if error is None:
            error = self._refusal(message, box, key)
        if error is not None:
            self._fail(message, error)
            self._after_latency(flow, lambda: self._acknowledge(message))
            return
        message.payload = message.payload.clone()
        message.state = "arrived"
        waiter = box.waiting.pop(key, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(message)
        else:
            box.arrived[key] = message
        self._wake_left_behind(flow.dst, flow.src)
        self._after_latency(flow, lambda: self._acknowledge(message))

    def _gone_on(self, dst: int, key: Key) -> bool:
        """Whether the sender is done with what `dst` waits for: it will never send it.

        It has sent something later of the same kind, or has ended; and it finishes what it sends
        for a round before it begins the next.
        """
        src, tag = key
        if (dst, src, tag) in self._flying:
            return False
        return self._finished[src] or any(
            other.kind == tag.kind and (other.round_index, other.step) > (tag.round_index, tag.step)
            for sender, other in self._boxes[dst].arrived
            if sender == src
        )

    def _wake_left_behind(self, dst: int, src: int) -> None:
        """Tell `dst` where it waits for what `src` will never send."""
        box = self._boxes[dst]
        for key in [k for k in box.waiting if k[0] == src and self._gone_on(dst, k)]:
            waiter = box.waiting.pop(key)
            box.closed.add(key)
            if not waiter.done():
                waiter.set_exception(_passed(src))

    def finish(self, worker: int) -> None:
        """The worker has done its last round."""
        self._finished[worker] = True
        for dst in range(len(self._boxes)):
            self._wake_left_behind(dst, worker)

    def _refusal(self, message: Message, box: Mailbox, key: Key) -> CommError | None:
        if not self._alive[message.dst]:
            return PeerLost(f"worker {message.dst} is gone")
        if key in box.closed or message.tag.round_index < box.round_index:
            return LinkFailed(f"worker {message.dst} no longer waits for this message")
        if not message.exact and not is_finite(message.payload):
            return PayloadCorrupt(f"worker {message.src} sent values that are not finite")
        return None

    def _fail(self, message: Message, error: CommError) -> None:
        """Mark a message as failed and tell the receiver; the sender hears by acknowledgement."""
        message.state, message.error = "failed", error
        box = self._boxes[message.dst]
        key = (message.src, message.tag)
        if key in box.closed or not self._alive[message.dst]:
            return
        waiter = box.waiting.pop(key, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(message)
        elif message.tag.round_index >= box.round_index:
            box.arrived[key] = message

    def _acknowledge(self, message: Message) -> None:
        if message.ack is None or message.ack.done():
            return
        if message.state == "failed":
            assert message.error is not None
            message.ack.set_exception(message.error)
            message.ack.exception()  # awaited or not, it is not a lost error
        else:
            message.ack.set_result(None)

    async def recv(self, dst: int, src: int, tag: Tag, timeout_s: float) -> Tensor:
        """One message; see `Context.recv`. A transfer that makes progress is not timed out."""
        box = self._boxes[dst]
        key = (src, tag)
        message = box.arrived.pop(key, None)
        if message is None:
            if not self._alive[src]:
                box.closed.add(key)
                raise PeerLost(f"worker {src} is gone")
            if self._gone_on(dst, key):
                box.closed.add(key)
                raise _passed(src)
            message = await self._wait(box, dst, key, timeout_s)
        if message.state == "failed":
            assert message.error is not None
            raise message.error
        message.state = "taken"
        return message.payload

    async def _wait(self, box: Mailbox, dst: int, key: Key, timeout_s: float) -> Message:
        src, tag = key
        waiter: asyncio.Future[Message] = self.loop.create_future()
        box.waiting[key] = waiter

        def expire() -> None:
            if waiter.done():
                return
            if (dst, src, tag) in self._flying:
                return  # its bytes are moving, and a stalled one fails by itself
            box.waiting.pop(key, None)
            box.closed.add(key)
            waiter.set_exception(TimedOut(f"nothing from worker {src} within {timeout_s:g} s"))

        timer = self.loop.call_at_ns(self.loop.time_ns() + to_ns(timeout_s), expire)
        try:
            return await waiter
        finally:
            timer.cancel()
            if box.waiting.get(key) is waiter:
                del box.waiting[key]

    def withdraw(self, message: Message) -> None:
        """Give a transfer up; what was not yet taken never will be."""
        if message.state in ("taken", "failed"):
            return
        box = self._boxes[message.dst]
        key = (message.src, message.tag)
        error = LinkFailed(f"worker {message.src} gave the transfer up")
        if message.state == "flying":
            self._flying.pop((message.dst, message.src, message.tag), None)
            self.network.cancel(message.flow)
            self._note("cancelled", message.flow)
        elif box.arrived.pop(key, None) is None:
            return  # handed to a receiver that is about to run
        self._fail(message, error)
        self._acknowledge(message)

    def begin_round(self, worker: int, round_index: int) -> None:
        """Forget what belongs to earlier rounds, and refuse what still comes of them."""
        box = self._boxes[worker]
        box.round_index = round_index
        for key in [k for k in box.arrived if k[1].round_index < round_index]:
            del box.arrived[key]
        box.closed = {k for k in box.closed if k[1].round_index >= round_index}

    def kill(self, worker: int) -> None:
        """A worker's process is gone: everything to and from it breaks."""
        self._alive[worker] = False
        lost = PeerLost(f"worker {worker} is gone")
        self.network.abort(worker, lost)
        self._boxes[worker] = Mailbox(round_index=self._boxes[worker].round_index)
        for box in self._boxes:
            for key in [k for k in box.waiting if k[0] == worker]:
                waiter = box.waiting.pop(key)
                box.closed.add(key)
                if not waiter.done():
                    waiter.set_exception(lost)

    def revive(self, worker: int) -> None:
        """The worker is back, with an empty mailbox."""
        self._alive[worker] = True
        self._boxes[worker] = Mailbox(round_index=self._boxes[worker].round_index)

    def is_alive(self, worker: int) -> bool:
        return self._alive[worker]
