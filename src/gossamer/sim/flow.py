"""One transfer on the simulated network, and its state as plain integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from gossamer.comm.context import Tag
from gossamer.errors import (
    CollectiveFailed,
    CommError,
    LinkFailed,
    OutOfSync,
    PayloadCorrupt,
    PeerLost,
    TimedOut,
)

RATE_PER_BYTE_PER_S = 1_000_000
WORK_PER_BYTE = RATE_PER_BYTE_PER_S * 1_000_000_000  # work = rate * nanoseconds


class FlowState(Enum):
    """Where a flow is in its life."""

    NEW = "new"
    ACTIVE = "active"  # holds a share of its links, which may be nothing
    ARRIVING = "arriving"  # through or failed; `on_done` follows after the latency
    DONE = "done"


@dataclass(slots=True, eq=False)
class Flow:
    """One transfer.

    Args:
        src, dst: the workers at its ends, different ones.
        num_bytes: what is charged, 0 or more.
        tag: what it is; part of the key of its failure draws.
        on_done: called once at the receiver's time, with None or with what went wrong.
        subject_to_failure: whether failures and corruption are drawn for it.
        control: a control message, which failure unit "worker" strikes along with the payloads.
    """

    src: int
    dst: int
    num_bytes: int
    tag: Tag
    on_done: Callable[[Flow, CommError | None], None]
    subject_to_failure: bool = True
    control: bool = False
    state: FlowState = field(default=FlowState.NEW, init=False)
    started_ns: int = field(default=-1, init=False)
    updated_ns: int = field(default=-1, init=False)  # when `remaining` was last brought up to date
    remaining: int = field(default=0, init=False)  # work that was left then
    rate: int = field(default=0, init=False)  # since then
    stalled_ns: int = field(default=-1, init=False)  # since when its rate is 0; -1: it moves
    due_ns: int = field(default=-1, init=False)  # when it is through or given up; -1: not planned
    arrives_ns: int = field(default=-1, init=False)  # when `on_done` is called
    error: CommError | None = field(default=None, init=False)
    links: tuple[int, ...] = field(default=(), init=False)  # indices of those that it uses

    def order(self) -> tuple[int, int, int, Tag, int]:
        """Sorts flows by what they are, not by when they were listed."""
        return (self.src, self.dst, self.started_ns, self.tag, self.num_bytes)

    @property
    def rate_bytes_per_s(self) -> float:
        """Current share of the links."""
        return self.rate / RATE_PER_BYTE_PER_S

    def bytes_left(self, now_ns: int) -> float:
        """Bytes that have not left the sender at `now_ns`."""
        return (self.remaining - self.rate * (now_ns - self.updated_ns)) / WORK_PER_BYTE

    def snapshot(self) -> dict[str, int | str]:
        """All that `SimNetwork.restore` needs beside the constructor's arguments; for JSON."""
        state: dict[str, int | str] = {name: getattr(self, name) for name in _SAVED_INTS}
        state["state"] = self.state.value
        if self.error is not None:
            state["error"] = type(self.error).__name__
            state["message"] = str(self.error)
        return state

    def load(self, snapshot: dict[str, int | str]) -> None:
        """Take over what `snapshot` gave."""
        for name in _SAVED_INTS:
            setattr(self, name, int(snapshot[name]))
        self.state = FlowState(snapshot["state"])
        if "error" in snapshot:
            kinds = {kind.__name__: kind for kind in _SAVED_ERRORS}
            self.error = kinds[str(snapshot["error"])](str(snapshot["message"]))


_SAVED_INTS = ("started_ns", "updated_ns", "remaining", "rate", "stalled_ns", "due_ns",
               "arrives_ns")  # fmt: skip
_SAVED_ERRORS: tuple[type[CommError], ...] = (
    CommError, LinkFailed, PayloadCorrupt, PeerLost, TimedOut, CollectiveFailed, OutOfSync,
)  # fmt: skip
