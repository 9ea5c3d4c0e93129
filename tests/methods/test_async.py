"""Asynchronous DiLoCo: delayed Nesterov, steps by speed, and that nothing counts twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.comm.letters import Letter
from gossamer.measure.settings import Measure
from gossamer.methods import AsyncDiLoCo, DiLoCo, Method
from gossamer.outer.delayed_nesterov import delayed_nesterov_step_
from gossamer.outer.nesterov import nesterov_step_
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults, Outage
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.engine import Engine
from gossamer.training.problems import TinyMLP
from gossamer.training.settings import Training

ADAMW = Training(learning_rate=0.02, clip_norm=0)
SGD = Training(optimizer="sgd", learning_rate=0.1, schedule="constant", clip_norm=0, weight_decay=0)
MLP = TinyMLP(dtype=torch.float64)
FAST = Network(bandwidth="10Gbit/s")


def run(method: Method, *, workers: int = 4, rounds: int = 5, **more: Any) -> SimulationResult:
    more.setdefault("training", SGD)
    more.setdefault("network", FAST)
    more.setdefault("timing", Timing(step_time=1.0))
    quiet = Measure(every=0)
    return simulate(method=method, task=MLP, workers=workers, rounds=rounds, measure=quiet, **more)


def total(result: SimulationResult, name: str) -> float:
    cell = result.summary["records"].get(name, {"count": 0, "mean": 0.0})
    return round(cell["count"] * cell["mean"], 6)


# ------------------------------------------------------------------------------- the outer step


class Outer:
    """z, v and A [P] under delayed Nesterov."""

    def __init__(self, start: Tensor) -> None:
        self.point, self.velocity = start.clone(), torch.zeros_like(start)
        self.pending, self.arrivals = torch.zeros_like(start), 0

    def take(self, delta: Tensor, delay: int) -> None:
        self.arrivals += 1
        delayed_nesterov_step_(
            self.point, self.velocity, self.pending, delta,
            learning_rate=0.7, momentum=0.9, delay=delay, arrival=self.arrivals,
        )  # fmt: skip


def random_vectors(count: int) -> Tensor:
    return torch.randn(count, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_with_delay_one_it_is_nesterov_bit_for_bit() -> None:
    start, *deltas = random_vectors(8)
    outer, point, velocity = Outer(start), start.clone(), torch.zeros_like(start)
    for delta in deltas:
        outer.take(delta, 1)
        nesterov_step_(point, velocity, delta, learning_rate=0.7, momentum=0.9)
    assert torch.equal(outer.point, point)


@pytest.mark.parametrize("delay", [2, 5])
def test_n_arrivals_are_one_nesterov_step_on_their_mean(delay: int) -> None:
    start, *deltas = random_vectors(1 + 4 * delay)
    outer, point, velocity = Outer(start), start.clone(), torch.zeros_like(start)
    for k, delta in enumerate(deltas, start=1):
        outer.take(delta, delay)
        if k % delay == 0:
            mean = torch.stack(deltas[k - delay : k]).mean(0)
            nesterov_step_(point, velocity, mean, learning_rate=0.7, momentum=0.9)
            assert torch.allclose(outer.point, point, rtol=0, atol=1e-13)
            assert float(outer.pending.abs().max()) == 0.0
        else:  # what has come counts at once, without momentum
            came = torch.stack(deltas[k // delay * delay : k]).sum(0)
            expected = point - 0.7 * came / delay
            assert torch.allclose(outer.point, expected, rtol=0, atol=1e-13)


# ------------------------------------------------------------------------------------ whole runs


def test_one_worker_is_diloco() -> None:
    method = AsyncDiLoCo(inner_steps=3)
    one = run(method, workers=1, training=ADAMW)
    diloco = run(DiLoCo(inner_steps=3), workers=1, training=ADAMW)
    assert torch.equal(one.parameters, diloco.parameters)


def textbook(start: Tensor, arrivals: list[tuple[int, int]], engine: Engine) -> list[Tensor]:
    """Deltas taken in the order of (worker, its round), three steps each, by hand."""
    server, velocity, pending = start.clone(), torch.zeros_like(start), torch.zeros_like(start)
    received = [start.clone() for _ in range(2)]
    for count, (worker, round_index) in enumerate(arrivals, start=1):
        theta = received[worker].clone()
        for step in range(3 * round_index, 3 * round_index + 3):
            for name, view in engine.layout.views(theta).items():
                engine.model.get_parameter(name).data = view.clone()
            engine.model.zero_grad()
            MLP.loss(engine.model, MLP.train_batch(worker, step)).backward()
            for name, view in engine.layout.views(theta).items():
                view.sub_(0.1 * engine.model.get_parameter(name).grad)
        delta = received[worker] - theta
        server -= 0.7 * delta / 2
        pending += delta
        if count % 2 == 0:
            velocity = 0.9 * velocity + pending / 2
            server -= 0.7 * 0.9 * velocity
            pending = torch.zeros_like(start)
        received[worker] = server.clone()
    return received


def test_it_is_the_textbook_loop_in_the_order_of_arrivals() -> None:
    timing = Timing(step_time=1.0, speeds=(1, 0.6))
    method = AsyncDiLoCo(inner_steps=3, local_steps="equal")
    result = run(method, workers=2, rounds=4, timing=timing)
    # They come after 3, 6, 9, 12 and 5, 10, 15, 20 seconds.
    order = [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3), (1, 2), (1, 3)]
    engine = Engine(MLP, SGD, seed=0, total_steps=1, real=True)
    _, (replica,) = engine.new_replicas(1)
    expected = textbook(replica.parameters.clone(), order, engine)
    for row, theta in zip(result.parameters, expected, strict=True):
        assert torch.allclose(row, theta, rtol=0, atol=1e-13)
    # Between what a delta was made from and its arrival: of the other worker's arrivals.
    assert total(result, "staleness") == 0 + 1 + 1 + 0 + 2 + 1 + 1 + 0


def test_steps_are_proportional_to_measured_speed() -> None:
    timing = Timing(step_time=1.0, speeds=(1, 0.5, 0.25))
    result = run(AsyncDiLoCo(inner_steps=8), workers=3, rounds=6, timing=timing)
    steps = [8 + 5 * 8, 8 + 5 * 4, 8 + 5 * 2]  # H once, when nothing is known, then by speed
    assert result.summary["samples"] == 16 * sum(steps)
    assert result.summary["time_s"] == pytest.approx(8 / 0.25 + 5 * 8, abs=0.1)
    equal = run(AsyncDiLoCo(inner_steps=8, local_steps="equal"), workers=3, rounds=6, timing=timing)
    assert equal.summary["time_s"] == pytest.approx(6 * 8 / 0.25, abs=0.1)
    assert equal.summary["utilization"] == pytest.approx(1.0, abs=0.01)


def test_every_sample_is_merged_once_where_nothing_fails() -> None:
    method = AsyncDiLoCo(inner_steps=4, local_steps="equal")
    result = run(method, timing=Timing(step_time=1.0, jitter=0.3))
    assert total(result, "merged_samples") == result.summary["samples"] == 4 * 5 * 4 * 16
    assert total(result, "refused_samples") == 0


def test_bytes_are_those_of_the_documented_cost() -> None:
    method = AsyncDiLoCo(inner_steps=4)
    result = run(method, rounds=3)
    kinds, size = result.summary["bytes_by_kind"], result.summary["parameters"]
    assert kinds["model"] == 4 * 3 * (8 * size + 4 * 8)
    assert kinds["delta"] == 4 * 3 * (8 * size + 4 * 8)


class Recorder:
    """As much of a context as a server's rules need."""

    num_workers, num_rounds = 2, 9
    present: tuple[int, ...] = ()

    def connected(self) -> tuple[int, ...]:
        return self.present

    def __init__(self) -> None:
        self.records: list[tuple[str, float]] = []

    def record(self, name: str, value: float) -> None:
        self.records.append((name, value))


def test_the_same_outer_gradient_is_taken_once() -> None:
    """Whoever has not received the model that its last one is in sends it again with the next."""
    engine = Engine(MLP, SGD, seed=0, total_steps=1, real=True)
    _, (replica,) = engine.new_replicas(1)
    method, ctx = AsyncDiLoCo(), Recorder()
    state = method.init_syncer(replica, 2)
    delta = torch.ones_like(state.point)

    def take(step: int, taken: int, worker: int = 0) -> None:
        note = (taken, 0, 64, 10**9)
        method._take(ctx, state, Letter(worker, step, note, delta.clone()))  # type: ignore[arg-type]

    take(1, 0)
    after = state.point.clone()
    take(2, 0)
    assert torch.equal(state.point, after)
    assert ctx.records[-1] == ("refused_samples", 64.0)
    take(1, 0, worker=1)
    take(3, 1)
    assert (state.arrivals, state.taken.tolist()) == (3, [2, 1])


def test_speeds_are_those_of_workers_that_are_there_or_have_done_their_part() -> None:
    engine = Engine(MLP, SGD, seed=0, total_steps=1, real=True)
    _, (replica,) = engine.new_replicas(1)
    method, ctx = AsyncDiLoCo(inner_steps=10), Recorder()
    state = method.init_syncer(replica, 4)
    state.step_ns += torch.tensor([1, 2, 3, 0]) * 10**9  # of the last nothing is known

    def steps(*present: int) -> list[int]:
        ctx.present = present
        return [method._steps_of(ctx, state, worker) for worker in present]  # type: ignore[arg-type]

    assert steps(0, 1, 2, 3) == [10, 5, 3, 10]
    assert steps(1, 2) == [10, 6]
    state.taken[0] = ctx.num_rounds
    assert steps(1, 2) == [5, 3]


def test_workers_train_on_while_the_server_is_away_and_nothing_merged_is_lost() -> None:
    away = Faults(crashes=(CrashAt(worker=4, start=9.0, return_after=14.0),))
    result = run(AsyncDiLoCo(inner_steps=4), rounds=10, faults=away,
                 network=Network(bandwidth="10Gbit/s", deadline="5s"))  # fmt: skip
    assert result.workers == (0, 1, 2, 3)
    assert total(result, "unanswered") == 4 * 2  # of rounds that end at 12 and 21 s
    assert total(result, "merged_samples") == result.summary["samples"] == 4 * 10 * 4 * 16
    spread = (result.parameters - result.parameters[0]).abs().max()
    assert float(spread) < float(result.parameters.std())


def test_a_lost_answer_costs_the_next_round_and_no_more() -> None:
    # Four vectors of 11.5 kbit share the server's line from 4 to 5.2 s, and then on the way back.
    # Worker 0 trains on at 9 s, and is refused when its line is there again.
    cut = Faults(outages=(Outage(worker=0, start=5.5, duration=9.0),))
    slow = Network(bandwidth="40kbit/s", deadline="5s")
    result = run(AsyncDiLoCo(inner_steps=4), faults=cut, network=slow)
    assert total(result, "refused_samples") == 2 * 4 * 16  # two rounds, of which one was merged
    merged = total(result, "merged_samples")
    assert merged + 4 * 16 == result.summary["samples"]


def test_who_returns_asks_for_the_servers_model_first() -> None:
    crash = Faults(crashes=(CrashAt(worker=1, start=6.0, return_after=4.0),))
    result = run(AsyncDiLoCo(inner_steps=4), rounds=8, faults=crash)
    assert result.workers == (0, 1, 2, 3)
    assert result.summary["bytes_by_kind"]["hello"] == 1
    assert total(result, "refused_samples") == 0


faults = st.builds(
    Faults,
    crashes=st.lists(
        st.builds(CrashAt, worker=st.integers(1, 4), start=st.floats(1, 40),
                  return_after=st.sampled_from([0.5, 7.0, 30.0])),
        max_size=3,
    ),
    outages=st.lists(
        st.builds(Outage, worker=st.integers(0, 4), start=st.floats(0, 40),
                  duration=st.floats(0.1, 20)),
        max_size=3,
    ),
)  # fmt: skip


# Who returns while the server is away has its donor's progress, which the donor sends itself.
DONOR_ALONE = Faults(
    crashes=(CrashAt(worker=1, start=8.0, return_after=0.5),
             CrashAt(worker=4, start=8.0, return_after=30.0)),
)  # fmt: skip


@settings(max_examples=12, deadline=None)
@example(faults=DONOR_ALONE, seed=0)
@given(faults=faults, seed=st.integers(0, 1000))
def test_under_any_faults_no_sample_counts_twice_and_nothing_hangs(
    faults: Faults, seed: int
) -> None:
    result = run(
        AsyncDiLoCo(inner_steps=6),
        faults=faults,
        seed=seed,
        timing=Timing(step_time=1.0, speeds=(1, 0.9, 1.1, 0.7), jitter=0.2),
        network=Network(bandwidth="1Mbit/s", latency="50ms", failure_probability=0.05,
                        failure_unit="transfer", deadline="20s"),
    )  # fmt: skip
    assert total(result, "merged_samples") <= result.summary["samples"]
    assert bool(torch.isfinite(result.parameters[list(result.workers)]).all())


def test_the_same_run_has_the_same_trace_and_it_runs_without_numerics() -> None:
    timing = Timing(step_time=1.0, speeds=(1, 0.9, 1.1, 0.7), jitter=0.2)
    runs = [run(AsyncDiLoCo(inner_steps=6), timing=timing) for _ in range(2)]
    assert runs[0].summary["trace_hash"] == runs[1].summary["trace_hash"]
    assert torch.equal(runs[0].parameters, runs[1].parameters)
    timed = run(AsyncDiLoCo(inner_steps=6), timing=timing, numerics="none")
    assert timed.summary["time_s"] == runs[0].summary["time_s"]
