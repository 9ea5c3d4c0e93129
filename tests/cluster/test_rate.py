"""Emulated lines keep their rate, and the watch over stalls its patience."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable

import pytest
import torch

from gossamer.cluster.limits import Limits
from gossamer.cluster.pacing import Line, Watchdog
from gossamer.cluster.transport import GrpcTransport
from gossamer.comm.context import Tag
from gossamer.errors import ConfigError


def test_an_unlimited_line_takes_no_time() -> None:
    line = Line(None)
    assert line.send(10**12, now=3.0) == 3.0
    assert line.receive(10**12, now=3.0) == 3.0


@pytest.mark.parametrize("rate", [1e4, 12.5e6, 1e9])
@pytest.mark.parametrize("lateness_s", [0.0, 0.001, 0.05])
def test_the_rate_is_exact_however_late_a_sender_is_woken(rate: float, lateness_s: float) -> None:
    """Pieces of 10 ms, each asked for when the one before has left and a little later."""
    draw = random.Random(1)
    line, now, num_bytes, begun = Line(rate), 5.0, rate / 100, 5.0
    for _ in range(1000):
        if (free_at := line.send(round(num_bytes), now)) > now:
            now = free_at + draw.uniform(0, lateness_s)
    took_s = now - begun
    assert took_s == pytest.approx(1000 * round(num_bytes) / rate, rel=0.002, abs=2 * lateness_s)


def test_rest_gives_no_credit() -> None:
    line = Line(100.0)
    assert line.send(100, now=0.0) == 1.0
    assert line.send(100, now=50.0) == 51.0  # not earlier than if it had never rested
    assert line.send(100, now=50.0) == 52.0  # behind the one before


def test_two_senders_share_a_line() -> None:
    line, times = Line(1000.0), {"a": 0.0, "b": 0.0}
    for _ in range(500):
        for name, now in times.items():
            times[name] = line.send(10, now=now)
    assert times["a"] == pytest.approx(10.0, abs=0.05)  # 2 * 5000 bytes
    assert times["b"] == pytest.approx(10.0, abs=0.05)


def test_receiving_at_the_senders_pace_adds_nothing() -> None:
    sends, receives, now = Line(1000.0), Line(1000.0), 7.0
    for _ in range(100):
        now = sends.send(10, now)
        assert receives.receive(10, now) == pytest.approx(now, abs=0.011)
    assert now == pytest.approx(8.0)


def test_a_receiver_is_slower_than_two_senders() -> None:
    receives, now = Line(1000.0), 0.0
    done = 0.0
    for _ in range(100):
        now += 0.01
        for _ in range(2):
            done = receives.receive(10, now)
    assert done == pytest.approx(2.0, abs=0.06)


def test_reading_late_now_and_then_does_not_slow_a_receiver() -> None:
    receives, draw, done = Line(1000.0), random.Random(2), 0.0
    for piece in range(1, 1001):
        done = receives.receive(10, piece * 0.01 + draw.uniform(0, 0.04))
    assert done == pytest.approx(10.0, abs=0.06)


def test_control_messages_pass_at_once_and_are_paid_for() -> None:
    line = Line(1000.0)
    line.charge(500, now=0.0)
    assert line.send(500, now=0.0) == pytest.approx(1.0)


class FakeLoop:
    """Timers without a clock of their own, for the watchdog."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        self.timers.append((when, callback))

    def run_to(self, now: float, step: float = 0.05) -> None:
        while self.now < now:
            self.jump_to(min(now, self.now + step))

    def jump_to(self, now: float) -> None:
        self.now = now
        due = [t for t in self.timers if t[0] <= now]
        self.timers = [t for t in self.timers if t[0] > now]
        for _, callback in due:
            callback()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLoop:
    fake = FakeLoop()
    monkeypatch.setattr("asyncio.get_running_loop", lambda: fake)
    return fake


def test_the_watchdog_waits_for_a_whole_period_without_food(fake: FakeLoop) -> None:
    stalls: list[float] = []
    dog = Watchdog(1.0, lambda: stalls.append(fake.now))
    for _ in range(10):
        fake.run_to(fake.now + 0.9)
        dog.feed()
    assert stalls == []
    fake.run_to(fake.now + 5)
    assert stalls == [pytest.approx(10.0, abs=0.06)]
    assert dog.tripped


def test_the_watchdog_forgives_a_process_that_was_frozen(fake: FakeLoop) -> None:
    stalls: list[float] = []
    Watchdog(1.0, lambda: stalls.append(fake.now))
    fake.run_to(0.5)
    fake.jump_to(30.0)  # stopped, and continued: nobody else is to blame yet
    assert stalls == []
    fake.run_to(32.0)
    assert stalls == [pytest.approx(31.0, abs=0.06)]


@pytest.mark.parametrize(("rate", "delay_s"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -0.1)])
def test_rates_and_delays_make_sense(rate: float, delay_s: float) -> None:
    with pytest.raises(ConfigError, match="rate is positive"):
        GrpcTransport(0, "run", listen="127.0.0.1:0", credentials=None, rate=rate, delay_s=delay_s)


async def _exchange(rate: float, delay_s: float, num_bytes: int) -> tuple[float, float]:
    """Time until both have the other's payload, and until both know that it was delivered."""
    ends = [
        GrpcTransport(
            worker, "run", listen="127.0.0.1:0", credentials=None,
            limits=Limits(), rate=rate, delay_s=delay_s,
        )
        for worker in range(2)
    ]  # fmt: skip
    addresses = [await end.start() for end in ends]
    for worker, end in enumerate(ends):
        end.set_peer(1 - worker, addresses[1 - worker])
    payload = torch.zeros(num_bytes, dtype=torch.uint8)
    warm = Tag("warm", 0)
    for worker, end in enumerate(ends):  # connect first
        await end.send(1 - worker, warm, payload[:1]).delivered()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    transfers = [end.send(1 - worker, Tag("mix1", 0), payload) for worker, end in enumerate(ends)]
    await asyncio.gather(*(e.recv(1 - i, Tag("mix1", 0), 30.0) for i, e in enumerate(ends)))
    received_s = loop.time() - begun
    await asyncio.gather(*(transfer.delivered() for transfer in transfers))
    delivered_s = loop.time() - begun
    await asyncio.gather(*(end.close(1.0) for end in ends))
    return received_s, delivered_s


def best_exchange(rate: float, delay_s: float, num_bytes: int, good: float) -> tuple[float, float]:
    """The quickest of a few: a busy machine can be late, but never early."""
    best = (math.inf, math.inf)
    for _ in range(5):
        found = asyncio.run(_exchange(rate, delay_s, num_bytes))
        assert found[0] >= 0.98 * (num_bytes / rate + delay_s)
        best = min(best, found)
        if best[0] <= good:
            break
    return best


def test_an_exchange_takes_as_long_as_its_line_says() -> None:
    """1 MB both ways at 1 MB/s, within 2 % and the lateness of one timer."""
    received_s, _ = best_exchange(rate=1e6, delay_s=0.0, num_bytes=1_000_000, good=1.03)
    assert received_s <= 1.03


def test_a_delay_comes_once_each_way() -> None:
    received_s, delivered_s = best_exchange(rate=1e7, delay_s=0.2, num_bytes=100, good=0.24)
    assert received_s <= 0.24
    assert 0.4 <= delivered_s <= received_s + 0.3


def test_a_message_that_waits_for_its_turn_is_no_stalled_one() -> None:
    """Four of 1 s each on one line, with a keepalive of 0.4 s: the last one waits for 3 s."""

    async def scene() -> None:
        limits = Limits(keepalive=0.4)
        ends = [
            GrpcTransport(w, "run", listen="127.0.0.1:0", credentials=None, limits=limits, rate=4e5)
            for w in range(2)
        ]
        addresses = [await end.start() for end in ends]
        for w, end in enumerate(ends):
            end.set_peer(1 - w, addresses[1 - w])
        payloads = [torch.full((100_000,), float(k)) for k in range(4)]
        for k, payload in enumerate(payloads):
            ends[0].send(1, Tag("mix", 0, segment=k), payload)
        for k, payload in enumerate(payloads):
            assert torch.equal(await ends[1].recv(0, Tag("mix", 0, segment=k), 10.0), payload)
        for end in ends:
            await end.close(0.5)

    asyncio.run(scene())
