"""Whoever misbehaves on the port is refused, is logged once, and harms nobody."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grpc import aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.cluster import wire
from gossamer.cluster.certs import Credentials, channel_options, issue, worker_name
from gossamer.cluster.limits import Limits
from gossamer.cluster.outbox import MESSAGE, SERVICE, WITHDRAW
from gossamer.cluster.transport import GrpcTransport
from gossamer.cluster.wire import Header, Reason, Reply
from gossamer.comm.context import Tag
from gossamer.errors import ConfigError, LinkFailed, TimedOut
from gossamer.testing.harness import numbers

RUN = "hostile"
LIMITS = Limits(
    payload_max=4e6, keepalive=1.0, header_timeout=0.5, connections_max=64, streams_max=32
)
PAYLOAD = torch.arange(1000.0)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "certs"
    issue(folder, 3)
    return folder


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another authority."""
    folder = tmp_path_factory.mktemp("foreign") / "certs"
    issue(folder, 3)
    return folder


@dataclass
class Victim:
    """Worker 1, and worker 0, which is honest; whatever happens they can exchange."""

    honest: GrpcTransport
    transport: GrpcTransport
    address: str
    exchanges: int = 0

    async def exchange(self) -> None:
        """Send a payload to the victim and one back."""
        self.exchanges += 1
        tag = Tag("honest", 0, part=self.exchanges)
        there, back = numbers(5000, 1), numbers(5000, 2)
        transfers = [self.honest.send(1, tag, there), self.transport.send(0, tag, back)]
        assert torch.equal(await self.transport.recv(0, tag, 20.0), there)
        assert torch.equal(await self.honest.recv(1, tag, 20.0), back)
        for transfer in transfers:
            await transfer.delivered()

    def refused(self, reason: Reason) -> int:
        return self.transport.traffic.refused.get(reason.name.lower(), 0)


@asynccontextmanager
async def victim(certs: Path | None = None, limits: Limits = LIMITS) -> AsyncIterator[Victim]:
    ends = []
    for worker in range(2):
        own = Credentials.load(certs, worker_name(worker)) if certs else None
        ends.append(
            GrpcTransport(worker, RUN, listen="127.0.0.1:0", credentials=own, limits=limits)
        )
    addresses = [await end.start() for end in ends]
    for worker, end in enumerate(ends):
        end.set_peer(1 - worker, addresses[1 - worker])
    try:
        yield Victim(ends[0], ends[1], addresses[1])
    finally:
        await asyncio.gather(*(end.close(1.0) for end in ends))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60.0))


def header(**changes: Any) -> Header:
    """Of an honest message of worker 0 to worker 1, but for `changes`."""
    honest = Header(
        run_id=RUN, sender=0, receiver=1, tag=Tag("evil", 0), dtype=torch.float32, shape=(1000,),
        exact=False, message_id=b"e" * 16, sender_life=b"l" * 16,
    )  # fmt: skip
    return replace(honest, **changes)


def frames(of: Header | None = None, payload: Tensor = PAYLOAD) -> list[bytes]:
    """A whole message."""
    raw = wire.raw_bytes(payload).numpy().tobytes()
    return [wire.pack_header(of or header()), raw, wire.pack_trailer(zlib.crc32(raw))]


@asynccontextmanager
async def channel(
    address: str, credentials: Credentials | None = None
) -> AsyncIterator[aio.Channel]:
    options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        opened = aio.insecure_channel(address, options)
    else:
        options += channel_options("worker-1")
        opened = aio.secure_channel(address, credentials.for_channel(), options)
    async with opened:
        yield opened


async def say(opened: aio.Channel, said: list[bytes], *, hang_up: bool = True) -> list[Reply]:
    """Everything that is answered to these frames; the stream must end."""
    call = opened.stream_stream(f"/{SERVICE}/{MESSAGE}")()
    try:
        for frame in said:
            await call.write(frame)
        if hang_up:
            await call.done_writing()
    except (aio.AioRpcError, asyncio.InvalidStateError):
        pass  # it was cut short; the answers say why
    replies = []
    while isinstance(frame := await call.read(), bytes):
        replies.append(wire.parse_reply(frame))
    return replies


async def reason_for(opened: aio.Channel, said: list[bytes], *, hang_up: bool = True) -> Reason:
    replies = await say(opened, said, hang_up=hang_up)
    assert replies[-1].kind == "refused", replies
    return replies[-1].reason


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# ------------------------------------------------------------------------------------ single crimes

NAN = PAYLOAD.clone()
NAN[700] = float("nan")
RAW = frames()[1]

CRIMES: dict[str, tuple[list[bytes], Reason]] = {
    "noise for a header": ([b"GET / HTTP/1.1\r\n"], Reason.PROTOCOL),
    "an empty header": ([b""], Reason.PROTOCOL),
    "nothing at all": ([], Reason.TRUNCATED),
    "a foreign run": (frames(header(run_id="another")), Reason.RUN),
    "another receiver": (frames(header(receiver=2)), Reason.IDENTITY),
    "the victim itself": (frames(header(sender=1)), Reason.IDENTITY),
    "an absurd shape": ([wire.pack_header(header(shape=(2**40,)))], Reason.SIZE),
    "more than is taken": ([wire.pack_header(header(shape=(10**6 + 1,)))], Reason.SIZE),
    "a chunk too long": ([frames()[0], RAW + b"x"], Reason.SIZE),
    "one chunk too many": ([*frames()[:2], b"more"], Reason.SIZE),
    "a trailer that lies": ([*frames()[:2], wire.pack_trailer(1)], Reason.CHECKSUM),
    "bytes that changed": ([frames()[0], RAW[:-8] + bytes(8), frames()[2]], Reason.CHECKSUM),
    "a stream that ends in the payload": ([frames()[0], RAW[:1000]], Reason.TRUNCATED),
    "a stream without a trailer": (frames()[:2], Reason.TRUNCATED),
    "not a number": (frames(payload=NAN), Reason.NOT_FINITE),
    "another life of the receiver": (frames(header(receiver_life=b"x" * 16)), Reason.LIFE),
}


@pytest.mark.parametrize("crime", CRIMES)
def test_a_crime_is_refused_and_said_once(crime: str, caplog: pytest.LogCaptureFixture) -> None:
    said, reason = CRIMES[crime]

    async def scene() -> None:
        async with victim() as there, channel(there.address) as opened:
            await there.exchange()
            for attempt in range(3):
                # Each time a new message: it is this crime that is refused, not a repetition.
                again = [
                    wire.pack_header(
                        replace(parsed, tag=Tag("evil", 0, part=attempt), message_id=bytes(16))
                    )
                    if index == 0 and (parsed := parsed_or_none(frame)) is not None
                    else frame
                    for index, frame in enumerate(said)
                ]
                assert await reason_for(opened, again) is reason
                await there.exchange()
            assert there.refused(reason) == 3
            # A stream that ends early may be a connection that broke, which has time to return.
            await settled(lambda: there.transport.untaken_bytes(0) == 0)
            with pytest.raises((LinkFailed, TimedOut)):  # nothing of it is ever handed over
                await there.transport.recv(0, Tag("evil", 0, part=0), 0.01)

    with caplog.at_level(logging.WARNING):
        run(scene())
    expected = 0 if reason is Reason.LIFE else 1  # which honest workers meet as well
    assert len(warnings(caplog)) == expected, warnings(caplog)


def parsed_or_none(frame: bytes) -> Header | None:
    try:
        return wire.parse_header(frame)
    except wire.Refused:
        return None


def test_a_lying_length_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    body = bytearray(wire.pack_header(header())[:-4])
    struct.pack_into(">Q", body, 6 + 67, 10**15)
    lie = bytes(body) + struct.pack(">I", zlib.crc32(bytes(body)))

    async def scene() -> None:
        async with victim() as there, channel(there.address) as opened:
            assert await reason_for(opened, [lie, RAW]) is Reason.SIZE
            await there.exchange()

    run(scene())


def test_a_replayed_message_is_refused() -> None:
    async def scene() -> None:
        async with victim() as there, channel(there.address) as opened:
            assert (await say(opened, frames()))[-1].kind == "accepted"
            assert await reason_for(opened, frames()) is Reason.REPLAY  # not yet taken
            assert torch.equal(await there.transport.recv(0, Tag("evil", 0), 5.0), PAYLOAD)
            assert await reason_for(opened, frames()) is Reason.REPLAY  # taken
            other = frames(header(message_id=b"o" * 16))  # the same tag, as another message
            assert await reason_for(opened, other) is Reason.REPLAY
            retry = frames(header(retry=True))  # what an honest sender does: told, not delivered
            assert (await say(opened, retry))[-1].kind == "accepted"
            with pytest.raises(TimedOut):
                await there.transport.recv(0, Tag("evil", 0), 0.01)
            there.transport.begin_round(1)
            assert await reason_for(opened, frames()) is Reason.LATE

    run(scene())


def test_a_slow_header_and_a_slow_payload_end(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with victim() as there, channel(there.address) as opened:
            slow = [
                reason_for(opened, [], hang_up=False),
                reason_for(opened, [frames()[0], RAW[:400]], hang_up=False),
            ]
            await there.exchange()
            assert await asyncio.gather(*slow) == [Reason.SLOW, Reason.SLOW]
            await there.exchange()

    run(scene())


# ------------------------------------------------------------------------------------ certificates


def test_without_the_right_certificate_nothing_is_said(
    certs: Path, foreign: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with victim(certs) as there:
            await there.exchange()
            stranger = Credentials.load(foreign, "worker-0")
            own = Credentials.load(certs, "worker-0")
            half = replace(stranger, ca=own.ca)  # trusts the victim, is not trusted
            for credentials in (None, stranger, half):
                async with channel(there.address, credentials) as opened:
                    with pytest.raises(aio.AioRpcError):
                        await say(opened, frames())
                await there.exchange()
            assert there.transport.traffic.taken_in == 4

    run(scene())


def test_a_worker_cannot_pass_for_another(certs: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        async with victim(certs) as there:
            await there.exchange()
            own = Credentials.load(certs, "worker-2")
            async with channel(there.address, own) as opened:
                assert await reason_for(opened, frames()) is Reason.IDENTITY
                withdraw = opened.unary_unary(f"/{SERVICE}/{WITHDRAW}")
                await withdraw(wire.pack_header(header(tag=Tag("honest", 0, part=1))))
                mine = frames(header(sender=2))
                assert (await say(opened, mine))[-1].kind == "accepted"
            async with channel(there.address, Credentials.load(certs, "coordinator")) as opened:
                assert await reason_for(opened, frames()) is Reason.IDENTITY
            await there.exchange()

    with caplog.at_level(logging.WARNING):
        run(scene())
    assert len(warnings(caplog)) == 2
    assert "'worker-2' sent as worker 0" in warnings(caplog)[0]


def test_a_server_cannot_pass_for_another(certs: Path) -> None:
    """Worker 2 sits at the address where worker 0 looks for worker 1: told at once, not sent to."""

    async def scene() -> None:
        async with victim(certs) as there:
            other = GrpcTransport(
                2, RUN, listen="127.0.0.1:0", limits=LIMITS,
                credentials=Credentials.load(certs, "worker-2"),
            )  # fmt: skip
            there.honest.set_peer(1, await other.start())
            begun = asyncio.get_running_loop().time()
            with pytest.raises(LinkFailed, match=r"(?i)peer name|certificate|verif"):
                await there.honest.send(1, Tag("mix1", 0), PAYLOAD).delivered()
            assert asyncio.get_running_loop().time() - begun < LIMITS.keepalive
            assert other.traffic.taken_in == 0
            await other.close(0.0)

    run(scene())


def test_the_wrong_certificate_is_found_before_anything_runs(certs: Path) -> None:
    with pytest.raises(ConfigError, match="worker 0 was given the certificate of worker-1"):
        GrpcTransport(0, RUN, listen="127.0.0.1:0", credentials=Credentials.load(certs, "worker-1"))


@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.1.2.3:80", "example.org:80", "[::]:80"])
def test_plain_text_stays_on_this_machine(address: str) -> None:
    with pytest.raises(ConfigError, match="without certificates"):
        GrpcTransport(0, RUN, listen=address, credentials=None)
    local = GrpcTransport(0, RUN, listen="127.0.0.1:0", credentials=None)
    with pytest.raises(ConfigError, match="without certificates"):
        local.set_peer(1, address)


@pytest.mark.parametrize("address", ["", "127.0.0.1", "127.0.0.1:port", ":80", "127.0.0.1:70000"])
def test_addresses_make_sense(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        GrpcTransport(0, RUN, listen=address, credentials=None)


def test_a_port_in_use_is_told() -> None:
    async def scene() -> None:
        async with victim() as there:
            second = GrpcTransport(2, RUN, listen=there.address, credentials=None)
            with pytest.raises(ConfigError, match="cannot listen on"):
                await second.start()

    run(scene())


# ------------------------------------------------------------------------------------------ crowds


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("greeting", [b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(4096)])
def test_many_connections_do_not_shut_out_the_honest(certs: Path, greeting: bytes) -> None:
    """500 that connect and say little or nonsense: dropped in time, and few at a time."""

    async def scene() -> None:
        async with victim(certs) as there:
            await there.exchange()
            before = open_files()
            host, _, port = there.address.rpartition(":")
            opened = []
            for _ in range(500):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(greeting)
                opened.append((reader, writer))
            assert open_files() - before <= 500 + LIMITS.connections_max + 10
            await there.exchange()  # on connections that were there
            for reader, _ in opened:  # each is hung up on by the victim, not by us
                await ended(reader)
            await there.exchange()
            for _, writer in opened:
                writer.transport.abort()
            del opened
            await settled(lambda: open_files() <= before + 4)
            late = GrpcTransport(
                2, RUN, listen="127.0.0.1:0", limits=LIMITS,
                credentials=Credentials.load(certs, "worker-2"),
            )  # fmt: skip
            await late.start()
            late.set_peer(1, there.address)  # a newcomer gets in afterwards
            await late.send(1, Tag("mix1", 0), PAYLOAD).delivered()
            await late.close(1.0)

    run(scene())


async def ended(reader: asyncio.StreamReader) -> None:
    try:
        while await asyncio.wait_for(reader.read(65536), 20.0):
            pass
    except ConnectionError:
        pass


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.02)


def test_messages_that_nobody_takes_stay_outside() -> None:
    """A peer sends 200 MB that nobody waits for: at most its share lies here."""
    limits = Limits(payload_max=4e6, untaken_max=8e6, keepalive=1.0, messages_max=60)

    async def scene() -> None:
        async with victim(limits=limits) as there:
            await there.exchange()
            gc.collect()
            before = peak_bytes()
            payload = torch.ones(1_000_000)
            tags = [Tag("flood", 0, part=part) for part in range(50)]
            transfers = [there.honest.send(1, tag, payload) for tag in tags]
            await settled(lambda: there.transport.untaken_bytes(0) >= 8_000_000)
            await there.exchange()
            await asyncio.wait_for(transfers[0].delivered(), 10.0)
            assert there.transport.untaken_bytes(0) <= 8_000_000
            assert peak_bytes() - before < 60e6
            for tag in tags[:10]:  # what is taken makes room for more
                await there.transport.recv(0, tag, 20.0)
            for transfer in transfers[10:]:
                transfer.cancel()
            await there.exchange()

    run(scene())


def test_too_many_messages_in_a_round_are_refused() -> None:
    limits = Limits(payload_max=4e6, keepalive=1.0, messages_max=10)

    async def scene() -> None:
        async with victim(limits=limits) as there:
            tiny = torch.ones(1)
            for part in range(10):
                await there.honest.send(1, Tag("flood", 0, part=part), tiny).delivered()
            with pytest.raises(wire.Refused, match="too many messages"):
                await there.honest.send(1, Tag("flood", 0, part=10), tiny).delivered()
            there.transport.begin_round(1)
            await there.honest.send(1, Tag("flood", 1), tiny).delivered()

    run(scene())


# ----------------------------------------------------------------------------------------- fuzzing


def test_any_frames_end_in_a_verdict_and_harm_nobody() -> None:
    """Streams of honest frames, damaged frames and noise in any order."""
    pieces = st.one_of(
        st.binary(max_size=200),
        st.sampled_from([*frames(), RAW[:100], RAW[100:], b"GEND", b""]),
    )
    loop = asyncio.new_event_loop()
    context = victim()
    there = loop.run_until_complete(context.__aenter__())
    dial = channel(there.address)
    opened = loop.run_until_complete(dial.__aenter__())
    count = iter(range(10**6))

    @settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        said=st.lists(pieces, max_size=5),
        start=st.one_of(st.none(), st.integers(0, 200)),
    )
    def attack(said: list[bytes], start: int | None) -> None:
        fresh = header(tag=Tag("evil", 0, part=next(count)))
        first = bytearray(wire.pack_header(fresh))
        if start is not None and start < len(first):
            first[start] ^= 0x55
        replies = loop.run_until_complete(
            asyncio.wait_for(say(opened, [bytes(first), *said]), 10.0)
        )
        assert replies[-1].kind in ("accepted", "refused")

    try:
        attack()
        loop.run_until_complete(there.exchange())
    finally:
        loop.run_until_complete(dial.__aexit__(None, None, None))
        loop.run_until_complete(context.__aexit__(None, None, None))
        loop.close()


@pytest.mark.parametrize("secure", [False, True])
def test_any_bytes_on_the_port_harm_nobody(certs: Path, secure: bool) -> None:
    """A byte fuzzer: noise, HTTP/2 frames with random fields, TLS records; while others work."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    draw = torch.Generator().manual_seed(7)

    def noise(size: int) -> bytes:
        return bytes(torch.randint(0, 256, (size,), generator=draw, dtype=torch.uint8).tolist())

    def frame() -> bytes:
        kind = int(torch.randint(0, 12, (1,), generator=draw))
        body = noise(int(torch.randint(0, 300, (1,), generator=draw)))
        return len(body).to_bytes(3, "big") + bytes([kind]) + noise(5) + body

    def attack(index: int) -> bytes:
        kinds = [
            noise(500),
            preface + noise(500),
            preface + b"".join(frame() for _ in range(8)),
            b"\x16\x03\x01" + noise(300),
            preface + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"".join(frame() for _ in range(8)),
        ]
        return kinds[index % len(kinds)]

    async def scene() -> None:
        async with victim(certs if secure else None) as there:
            await there.exchange()
            host, _, port = there.address.rpartition(":")
            for index in range(60):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(attack(index))
                if index % 10 == 0:
                    await there.exchange()
                if index % 2:
                    await ended(reader)
                writer.transport.abort()
            await there.exchange()
            assert there.transport.traffic.taken_in == there.exchanges

    run(scene())
