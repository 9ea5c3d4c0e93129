"""Messages are checked strictly, and the client knows what to try again."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, get_args

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.cluster import messages
from gossamer.cluster.control import SERVICE, Client, JoinRefused
from gossamer.cluster.messages import (
    KINDS,
    MAX_MESSAGE_BYTES,
    Accepted,
    JoinReply,
    JoinRequest,
    LogState,
    MalformedMessage,
    Message,
    Refusal,
    Report,
    View,
    decode,
    encode,
)
from gossamer.errors import ConfigError, OutOfSync

RUN = "0" * 32
REPORT = Report(
    worker=3, run_id=RUN, incarnation=1, round_started=7, rounds_completed=7, progress=9, loss=2.5,
    records={"js": 0.5},
)  # fmt: skip
JOIN = JoinRequest(
    worker=None, role="worker", address="10.0.0.1:7000", nonce=RUN, run_id=RUN,
    checkpoint_rounds=(4, 8), configuration='{"seed":0}', fingerprint=RUN,
)  # fmt: skip
VIEW = View(
    run_id=RUN, revision=4, phase="running", note="", peers=(), entries=(), losses=(),
    log=LogState(versions=((0, 0, (0, 1)),), newest_started=3, gone=(1,), since=((1, 9),)),
)  # fmt: skip
REPLY = JoinReply(
    worker=0, incarnation=1, deadline_s=8.0, report_every_s=1.0, warnings=(), view=VIEW
)


@pytest.mark.parametrize("message", [REPORT, JOIN, VIEW, REPLY], ids=lambda m: type(m).__name__)
def test_a_message_comes_through_as_it_was(message: Message) -> None:
    assert decode(encode(message), type(message)) == message


def changed(message: Message, **fields: Any) -> bytes:
    envelope = json.loads(encode(message))
    envelope["body"].update(fields)
    return json.dumps(envelope).encode()


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"extra": 1}, "unknown setting 'extra'"),
        ({"progress": "9"}, "valid integer"),
        ({"progress": 9.5}, "valid integer"),
        ({"progress": True}, "valid integer"),
        ({"progress": -1}, "greater than or equal to 0"),
        ({"progress": 1 << 53}, "less than"),
        ({"worker": 1 << 16}, "less than 65536"),
        ({"worker": None}, "valid integer"),
        ({"run_id": "../../etc/passwd"}, "match pattern"),
        ({"run_id": RUN.encode().hex()}, "match pattern"),
        ({"waiting": "no"}, "valid boolean"),
        ({"utilization": 1.5}, "less than or equal to 1"),
        ({"loss": "NaN"}, "valid number"),
        ({"loss": float("nan")}, "not JSON"),
        ({"loss": float("inf")}, "not JSON"),
        ({"records": [["js", 0.5]]}, "should be an object"),
        ({"records": {str(k): 0.0 for k in range(65)}}, "at most 64 items"),
        ({"records": {"x" * 300: 0.0}}, "at most 256 characters"),
    ],
    ids=str,
)
def test_what_is_not_as_it_must_be_is_refused(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(MalformedMessage, match=fault) as caught:
        decode(changed(REPORT, **fields), Report)
    assert caught.value.code == "malformed"
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("field", sorted(Report.model_fields))
def test_no_field_takes_just_anything(field: str) -> None:
    for nonsense in ([], {}, [[]], "x" * 4000):
        if field == "records" and nonsense == {}:
            continue
        with pytest.raises(MalformedMessage):
            decode(changed(REPORT, **{field: nonsense}), Report)


def test_missing_and_foreign_kinds_are_refused() -> None:
    envelope = json.loads(encode(REPORT))
    del envelope["body"]["progress"]
    with pytest.raises(MalformedMessage, match="report: progress: field required"):
        decode(json.dumps(envelope).encode(), Report)
    with pytest.raises(MalformedMessage, match="'join' was expected, not 'report'"):
        decode(encode(REPORT), JoinRequest)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"null", b"[]", b"{}", b"\xff\xfe", b'{"protocol":1,"kind":"report"}',
        b'{"protocol":1,"kind":["report"],"body":{}}', b'{"protocol":1,"kind":"report","body":[]}',
        b'{"protocol":1,"kind":"report","body":{},"more":1}', b"9" * 10_000,
        b'{"protocol":1,"kind":"report","body":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
    ids=lambda data: str(data[:24]),
)  # fmt: skip
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data, Report)


def test_a_huge_message_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_envelope", lambda _: pytest.fail("looked at it"))
    with pytest.raises(MalformedMessage, match="too long"):
        decode(b" " * (MAX_MESSAGE_BYTES + 1), Report)


@given(st.binary(max_size=400) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    for kind in KINDS.values():
        with pytest.raises(MalformedMessage):
            decode(data, kind)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(JoinRequest.model_fields)), json_values)
def test_any_value_in_a_field_is_right_or_refused(field: str, value: Any) -> None:
    try:
        message = decode(changed(JOIN, **{field: value}), JoinRequest)
    except MalformedMessage:
        return
    assert not isinstance(message, Refusal)
    kept = getattr(message, field)
    assert kept == (tuple(value) if isinstance(value, list) else value)
    assert message.worker is None or type(message.worker) is int
    assert message.role in get_args(messages.Role)


def test_versions_can_tell_each_other_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PROTOCOL", 2)
    newer, refusal = encode(REPORT), encode(Refusal(code="x", message="no", permanent=True))
    monkeypatch.undo()
    with pytest.raises(MalformedMessage, match="speaks protocol 2 and this one 1") as caught:
        decode(newer, Report)
    assert caught.value.code == "protocol"
    answer = decode(refusal, Accepted)
    assert isinstance(answer, Refusal) and answer.message == "no"


# --------------------------------------------------------------------------------------- client


@contextlib.asynccontextmanager
async def answering(*answers: bytes | grpc.StatusCode) -> AsyncIterator[Client]:
    """A server that gives these answers in turn, and the last one for ever."""
    left = list(answers)

    async def answer(_: bytes, context: Any) -> bytes:
        given_ = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(given_, grpc.StatusCode):
            await context.abort(given_, "as told")
            raise AssertionError("abort raises")
        return given_

    method: Any = grpc.unary_unary_rpc_method_handler(answer)  # type: ignore[arg-type]
    server = grpc.aio.server()
    handlers = dict.fromkeys(("Join", "Report", "Leave", "Status", "Reassign"), method)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = Client(f"127.0.0.1:{port}")
    try:
        yield client
    finally:
        await client.close()
        await server.stop(0)


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20.0))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.cluster.control._PAUSES_S", (0.001,))


JOINING = {"address": "127.0.0.1:1", "configuration": {"seed": 0}}


def test_what_may_pass_is_tried_again() -> None:
    async def scenario() -> None:
        passing = [
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.INTERNAL,
            encode(Refusal(code="occupied", message="taken", permanent=False)),
        ]
        async with answering(*passing, encode(REPLY)) as client:
            assert await client.join(**JOINING) == REPLY
            assert client.calls["Join"] == 4

    run(scenario)


@pytest.mark.parametrize(
    "code",
    ["UNIMPLEMENTED", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_ARGUMENT", "UNKNOWN"],
)
def test_what_cannot_pass_ends_at_once(code: str) -> None:
    async def scenario() -> None:
        async with answering(grpc.StatusCode[code]) as client:
            with pytest.raises(ConfigError, match="fails"):
                await client.join(**JOINING)
            assert client.calls["Join"] == 1

    run(scenario)


def test_refusals_are_typed() -> None:
    async def scenario() -> None:
        refusal = Refusal(code="configuration", message="seed was 0 and is now 1", permanent=True)
        async with answering(encode(refusal)) as client:
            with pytest.raises(JoinRefused, match="seed was 0") as caught:
                await client.join(**JOINING)
            assert (caught.value.code, client.calls["Join"]) == ("configuration", 1)
        given_up = encode(Refusal(code="expelled", message="no progress", permanent=True))
        async with answering(encode(REPLY), given_up) as client:
            await client.join(**JOINING)
            with pytest.raises(OutOfSync, match="no progress"):
                await client.report(round_started=0, rounds_completed=0, progress=1)
        taken = encode(Refusal(code="full", message="all taken", permanent=False))
        async with answering(taken) as client:
            with pytest.raises(JoinRefused, match="all taken"):
                await client.join(**JOINING, patience_s=0.02)
            assert client.calls["Join"] > 1
        async with answering(b"what?") as client:
            with pytest.raises(JoinRefused, match="not JSON"):
                await client.join(**JOINING)

    run(scenario)


def test_a_report_is_made_once_and_a_goodbye_is_not_waited_for() -> None:
    """The next report says more; who goes does not hang on a coordinator that is away."""

    async def scenario() -> None:
        async with answering(encode(REPLY), grpc.StatusCode.UNAVAILABLE) as client:
            await client.join(**JOINING)
            assert not await client.report(round_started=0, rounds_completed=0, progress=1)
            assert client.calls["Report"] == 1
            assert not client.connected
            assert not await client.leave("stopped", "x" * 5000, timeout_s=0.05)

    run(scenario)


def test_nobody_there_is_waited_for() -> None:
    async def scenario() -> None:
        client = Client("127.0.0.1:9")  # the discard port: nobody listens
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await client.status()
        assert client.calls["Status"] > 2
        await client.close()

    run(scenario)


def test_joining_comes_first() -> None:
    async def scenario() -> None:
        client = Client("localhost:9")
        with pytest.raises(ConfigError, match="join before"):
            await client.leave("finished", "")
        await client.close()

    run(scenario)
