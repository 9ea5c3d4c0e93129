"""What workers and the coordinator say to each other: typed, frozen, and checked strictly.

On the wire a message is JSON, `{"protocol": 1, "kind": "join", "body": {...}}`. Unknown fields,
wrong types, numbers out of range and absurd sizes are refused before anything looks at them. The
envelope and the body of a `Refusal` stay as they are in every version, so that two versions can
tell each other what is wrong.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gossamer.comm.members import EPOCH_BITS, MemberLog
from gossamer.settings import explain

PROTOCOL = 1
MAX_MESSAGE_BYTES = 1 << 20
LEAD_ROUNDS = 2  # reports lag: a change leaves the round alone that may just be starting

Index = Annotated[int, Field(ge=0, lt=1 << EPOCH_BITS)]
Counter = Annotated[int, Field(ge=0, lt=1 << 53)]
RoundOrNone = Annotated[int, Field(ge=-1, lt=1 << 53)]  # -1: before the first
Seconds = Annotated[float, Field(ge=0)]
Short = Annotated[str, Field(max_length=256)]
Text = Annotated[str, Field(max_length=2048)]
Identity = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]

Role = Literal["worker", "syncer"]
# waiting    joined; the run has not begun, or no donor is free
# joining    a donor's state is on its way
# running    takes part
# finished   has done the last round, or came too late for it
# lost       gone, or given up
Phase = Literal["waiting", "joining", "running", "finished", "lost"]
RunPhase = Literal["gathering", "running", "ended"]
Start = Literal["wait", "seed", "checkpoint", "donor", "over"]


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Refusal(Message):
    """Why a request was not granted; `permanent`: asking again is of no use."""

    code: Annotated[str, Field(max_length=32)]
    message: Text
    permanent: bool


class JoinRequest(Message):
    """A process wants to take part."""

    worker: Index | None  # None: any index that is free
    role: Role
    address: Short  # where the others reach its transport, HOST:PORT
    nonce: Identity  # of this attempt; asking again with it gives the same answer
    run_id: Identity | None  # the run that its state belongs to, None without a state
    checkpoint_rounds: Annotated[tuple[Counter, ...], Field(max_length=1024)]
    configuration: Annotated[str, Field(max_length=MAX_MESSAGE_BYTES // 2)]  # canonical JSON
    fingerprint: Identity


class Peer(Message):
    """A process as the others need to know it. A new incarnation is a new process."""

    worker: Index
    role: Role
    address: Short
    incarnation: Counter
    phase: Phase


class Entry(Message):
    """How a worker gets its state, and the first round that it takes part in.

    wait         not decided yet
    seed         from the run's seed, round 0
    checkpoint   from its own checkpoint of `round` completed rounds
    donor        from `donor`, at the boundary before `round`; `attempt` counts the donors asked
    over         the run ends before it could take part
    """

    worker: Index
    incarnation: Counter
    start: Start
    round: Counter = 0
    donor: Index | None = None
    attempt: Counter = 0


class Loss(Message):
    """A worker that left or was given up."""

    worker: Index
    incarnation: Counter
    cause: Short  # crash, hang, silent, replaced, stopped, error, out_of_sync
    reason: Text
    round: RoundOrNone  # the newest that anybody had started


class LogState(Message):
    """A `MemberLog` as JSON."""

    versions: tuple[tuple[Counter, Counter, tuple[Index, ...]], ...]
    newest_started: RoundOrNone
    gone: tuple[Index, ...]
    since: tuple[tuple[Index, Counter], ...]

    def member_log(self) -> MemberLog:
        """A log of one's own."""
        return MemberLog.load(dict(self), lead=LEAD_ROUNDS)


class View(Message):
    """All that a worker must know of the others; a later revision replaces an earlier one."""

    run_id: Identity
    revision: Counter
    phase: RunPhase
    note: Text  # what the run is waiting for, empty where for nothing
    log: LogState
    peers: tuple[Peer, ...]
    entries: tuple[Entry, ...]
    losses: tuple[Loss, ...]  # the newest few

    def peer(self, worker: int) -> Peer | None:
        """The process with this index, None before there was one."""
        return next((peer for peer in self.peers if peer.worker == worker), None)

    def running_workers(self) -> tuple[int, ...]:
        """Workers, without syncers, that take part; sorted."""
        running = (p for p in self.peers if p.role == "worker" and p.phase == "running")
        return tuple(sorted(peer.worker for peer in running))

    def entry(self, worker: int) -> Entry | None:
        """How the worker gets its state."""
        return next((entry for entry in self.entries if entry.worker == worker), None)


class JoinReply(Message):
    """Who the process is from now on."""

    worker: Index
    incarnation: Counter
    deadline_s: Seconds
    report_every_s: Seconds
    warnings: tuple[Text, ...]
    view: View


class WatchRequest(Message):
    """Follow the run; also how a worker makes itself known to a coordinator that restarted."""

    worker: Index
    run_id: Identity
    incarnation: Counter
    round_started: RoundOrNone
    rounds_completed: Counter


class Report(Message):
    """What a worker has done. The lease is renewed by `progress`, not by the report."""

    worker: Index
    run_id: Identity
    incarnation: Counter
    round_started: RoundOrNone  # index of the newest round begun, -1: none
    rounds_completed: Counter
    progress: Counter  # steps trained, transfers finished, waits begun and ended
    waiting: bool = False  # for a peer, by a wait that has a deadline of its own
    loss: float | None = None  # mean training loss of the newest round; None where not finite
    utilization: Annotated[float, Field(ge=0, le=1)] = 0.0
    blocked_s: Seconds = 0.0
    bytes_sent: Counter = 0
    records: Annotated[dict[Short, float], Field(max_length=64)] = {}


class Accepted(Message):
    """Done; `revision` tells a worker whether its view is the newest."""

    revision: Counter


class ReassignRequest(Message):
    """A joiner cannot get the state from its donor, or the donor cannot give it any more."""

    worker: Index  # who asks: the joiner or its donor
    run_id: Identity
    incarnation: Counter
    joiner: Index
    attempt: Counter
    reason: Text


class LeaveRequest(Message):
    """A worker goes on its own account."""

    worker: Index
    run_id: Identity
    incarnation: Counter
    cause: Literal["finished", "stopped", "error", "out_of_sync"]
    reason: Text


class StatusRequest(Message):
    """For a terminal view."""


class WorkerStatus(Message):
    """One worker, for people."""

    worker: Index
    role: Role
    address: Short
    alive: bool
    phase: Phase
    incarnation: Counter
    round: RoundOrNone
    rounds_completed: Counter
    progress_age_s: Seconds
    loss: float | None
    utilization: Seconds
    blocked_s: Seconds
    bytes_sent: Counter
    records: dict[Short, float]
    donor: Index | None  # where its state comes from, while joining
    joiners: tuple[Index, ...]  # those that it is the donor of
    why: Text  # how it was lost; empty where it was not


class Status(Message):
    """The whole run, for people."""

    run_id: Identity
    phase: RunPhase
    note: Text
    num_workers: Counter
    num_rounds: Counter
    round: RoundOrNone  # the newest that anybody has started
    epoch: Counter
    members: tuple[Index, ...]  # of that round, those lost left out
    deadline_s: Seconds
    workers: tuple[WorkerStatus, ...]


KINDS: dict[str, type[Message]] = {
    "refused": Refusal,
    "join": JoinRequest,
    "joined": JoinReply,
    "watch": WatchRequest,
    "view": View,
    "report": Report,
    "accepted": Accepted,
    "reassign": ReassignRequest,
    "leave": LeaveRequest,
    "ask_status": StatusRequest,
    "status": Status,
}
NAMES = {kind: name for name, kind in KINDS.items()}

M = TypeVar("M", bound=Message)


class MalformedMessage(ValueError):
    """Bytes that are no message; `code` as in `Refusal`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def encode(message: Message) -> bytes:
    """A message as it goes over the wire."""
    body = message.model_dump(mode="json")
    envelope = {"protocol": PROTOCOL, "kind": NAMES[type(message)], "body": body}
    return json.dumps(envelope, separators=(",", ":"), allow_nan=False).encode()


def decode(data: bytes, kind: type[M]) -> M | Refusal:
    """The message in `data`: of this kind, or a refusal. Raises `MalformedMessage`."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage("malformed", f"a message of {len(data)} bytes is too long")
    envelope, body = _envelope(data)
    if envelope["kind"] == "refused":
        return _validated(body, Refusal)
    if envelope["protocol"] != PROTOCOL:
        raise MalformedMessage(
            "protocol",
            f"the other side speaks protocol {envelope['protocol']!r:.32} and this one {PROTOCOL}; "
            f"install the same version of gossamer everywhere",
        )
    if KINDS.get(envelope["kind"]) is not kind:
        raise MalformedMessage(
            "malformed", f"{NAMES[kind]!r} was expected, not {envelope['kind']!r:.40}"
        )
    return _validated(body, kind)


def _envelope(data: bytes) -> tuple[dict[str, Any], str]:
    """The envelope, and its body as JSON again."""
    try:
        envelope = json.loads(data)
        if not isinstance(envelope, dict) or set(envelope) != {"protocol", "kind", "body"}:
            raise MalformedMessage("malformed", "a message without protocol, kind and body")
        if not isinstance(envelope["kind"], str):
            raise MalformedMessage("malformed", "the kind of a message is a string")
        return envelope, json.dumps(envelope["body"], allow_nan=False)
    except RecursionError:
        raise MalformedMessage("malformed", "a message that is nested too deeply") from None
    except MalformedMessage:
        raise
    except ValueError:
        raise MalformedMessage("malformed", "a message that is not JSON") from None


def _validated(body: str, kind: type[M]) -> M:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        text = f"{NAMES[kind]}: {explain(error, kind)}"
        raise MalformedMessage("malformed", text[:500]) from None
