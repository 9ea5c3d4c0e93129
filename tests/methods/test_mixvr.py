"""Local MixVR and mu^2-SGD: textbook loops, identities, costs and faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.comm.collectives import all_reduce_until_complete
from gossamer.comm.context import Context, Round
from gossamer.errors import ConfigError, RunFailed
from gossamer.measure.settings import Measure
from gossamer.methods import LocalMixVR, LocalSGD, Method, Mu2SGD, Storm
from gossamer.methods.mu2_sgd import DoubleMomentumState
from gossamer.outer.double_momentum import theory_momenta
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults, Partition
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.engine import Engine
from gossamer.training.problems import Quadratic, TinyMLP
from gossamer.training.replica import Replica
from gossamer.training.settings import Training
from gossamer.training.task import Task

THEORY: dict[str, Any] = {"schedule": "theory"}
CONSTANT: dict[str, Any] = {"schedule": "constant", "momentum": 0.8, "gamma": 0.7}


def run(method: Method, **given_: Any) -> SimulationResult:
    given_.setdefault("task", TinyMLP(dtype=torch.float64))
    given_.setdefault("training", Training(learning_rate=0.02, schedule="constant"))
    given_.setdefault("measure", Measure(every=0))
    given_.setdefault("workers", 3)
    given_.setdefault("rounds", 4)
    return simulate(method=method, **given_)


class Gradients:
    """The task's gradients by plain autograd: (point, worker, step) -> [P]."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.engine = Engine(task, Training(), seed=0, total_steps=1, real=True)
        self.start = self.engine.new_replicas(1)[0][0].clone()

    def __call__(self, point: Tensor, worker: int, step: int) -> Tensor:
        model = self.engine.model
        shapes = dict(model.named_parameters())
        views = self.engine.layout.views(point.clone().requires_grad_())
        leaves = {name: views[name] for name in shapes}

        def forward(*inputs: Any) -> Any:
            return torch.func.functional_call(model, leaves, inputs)

        flat = views[next(iter(views))]._base
        assert flat is not None
        loss = self.task.loss(forward, self.task.train_batch(worker, step))  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(loss, flat)
        return gradient

    def mean(self, point: Tensor, worker: int, steps: range) -> Tensor:
        return torch.stack([self(point, worker, step) for step in steps]).mean(0)


def textbook(
    gradients: Gradients,
    *,
    workers: int,
    rounds: int,
    local: int,
    minibatch: int,
    lr: float,
    momenta: Callable[[int], tuple[float, float, float]],
    corrected: tuple[bool, bool] = (True, True),
) -> Tensor:
    """The algorithm's box, worker by worker; x [M, P] at the end. Momenta: beta, gamma, weight."""
    w = gradients.start.repeat(workers, 1)
    x, old, d = w.clone(), w.clone(), torch.zeros_like(w)
    step = [0] * workers
    for t in range(1, rounds * (local + 1) + 1):
        sync = t % (local + 1) == 0
        beta, gamma, weight = momenta(t)
        if sync:
            w, x = w.mean(0).expand_as(w), x.mean(0).expand_as(x)
        estimates = []
        for i in range(workers):
            batches = range(step[i], step[i] + (minibatch if sync else 1))
            step[i] = batches.stop
            g = gradients.mean(x[i], i, batches)
            if t == 1:
                estimates.append(g)
            elif corrected[sync]:
                estimates.append(g + (1 - beta) * (d[i] - gradients.mean(old[i], i, batches)))
            else:
                estimates.append(beta * g + (1 - beta) * d[i])
        d = torch.stack(estimates)
        if sync:
            d = d.mean(0).expand_as(d)
        old = x
        w = w - weight * lr * d
        x = gamma * w + (1 - gamma) * x
    return x


def theory(t: int) -> tuple[float, float, float]:
    return 1 / t, 2 / (t + 2), float(t)


@pytest.mark.parametrize(
    ("settings_", "momenta"),
    [
        (THEORY, theory),
        (CONSTANT, lambda t: (0.2, 0.7, 1.0)),
        ({**CONSTANT, "gamma_weighs": "average"}, lambda t: (0.2, 0.3, 1.0)),
        ({"anytime_averaging": False, "momentum": 0.8}, lambda t: (0.2, 1.0, 1.0)),
        ({**CONSTANT, "variance_reduction": False}, lambda t: (0.2, 0.7, 1.0)),
        ({**CONSTANT, "drift_correction": False}, lambda t: (0.2, 0.7, 1.0)),
    ],
)
def test_local_mixvr_is_the_papers_algorithm_box(settings_: Any, momenta: Any) -> None:
    method = LocalMixVR(inner_steps=6, alpha=0.4, **settings_)
    assert (method.local_steps, method.minibatch) == (3, 3)
    expected = textbook(
        Gradients(TinyMLP(dtype=torch.float64)),
        workers=3,
        rounds=4,
        local=3,
        minibatch=3,
        lr=0.02,
        momenta=momenta,
        corrected=(method.variance_reduction, method.drift_correction),
    )
    found = run(method).parameters
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert float((found - Gradients(TinyMLP(dtype=torch.float64)).start).abs().max()) > 0.01


@pytest.mark.parametrize("settings_", [THEORY, CONSTANT, {"schedule": "theory", "first_weight": 2}])
def test_mu2_sgd_is_its_textbook_loop(settings_: Any) -> None:
    first = settings_.get("first_weight", 1)

    def momenta(t: int) -> tuple[float, float, float]:
        if settings_["schedule"] == "constant":
            return 0.2, 0.7, 1.0
        weights = [s - 1 + first for s in range(1, t + 2)]
        return 1 / weights[t - 1], weights[t] / sum(weights), float(weights[t - 1])

    gradients = Gradients(TinyMLP(dtype=torch.float64))
    found = run(Mu2SGD(inner_steps=5, **settings_), workers=2, rounds=2).parameters
    for worker in range(2):
        w, x, old, d = gradients.start, gradients.start, gradients.start, gradients.start
        for t in range(1, 11):
            beta, gamma, weight = momenta(t)
            g = gradients(x, worker, t - 1)
            d = g if t == 1 else g + (1 - beta) * (d - gradients(old, worker, t - 1))
            old, w = x, w - weight * 0.02 * d
            x = gamma * w + (1 - gamma) * x
        assert torch.allclose(found[worker], x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("settings_", [THEORY, CONSTANT])
def test_i13_one_worker_and_a_minibatch_of_one_is_mu2_sgd(settings_: Any) -> None:
    mixvr = run(LocalMixVR(inner_steps=5, alpha=0.2, **settings_), workers=1)
    assert LocalMixVR(inner_steps=5, alpha=0.2).minibatch == 1
    mu2 = run(Mu2SGD(inner_steps=5, **settings_), workers=1)
    assert torch.equal(mixvr.parameters, mu2.parameters)


def test_mu2_sgd_reduces_to_storm_and_to_plain_sgd() -> None:
    mu2 = run(Mu2SGD(inner_steps=5, momentum=0.7, gamma=1.0), workers=2)
    storm = run(Storm(inner_steps=5, momentum=0.7), workers=2)
    assert torch.equal(mu2.parameters, storm.parameters)
    sgd = Training(optimizer="sgd", learning_rate=0.02, schedule="constant", clip_norm=0,
                   weight_decay=0)  # fmt: skip
    plain = run(LocalSGD(inner_steps=5), workers=1, training=sgd)
    mu2 = run(Mu2SGD(inner_steps=5, momentum=0.0, gamma=1.0), workers=1)
    assert torch.allclose(mu2.parameters, plain.parameters, rtol=0, atol=1e-14)


@settings(
    deadline=None, max_examples=200, derandomize=True, phases=[Phase.explicit, Phase.generate]
)
@given(st.integers(1, 999), st.integers(1, 2000))
def test_the_budget_is_split_exactly(thousandths: int, inner_steps: int) -> None:
    method = LocalMixVR(inner_steps=inner_steps, alpha=thousandths / 1000)
    share = Fraction(thousandths, 1000) * inner_steps
    assert method.minibatch == -(-share.numerator // share.denominator)
    assert method.local_steps == inner_steps - method.minibatch
    assert 1 <= method.minibatch <= inner_steps


def test_a_split_that_floating_point_gets_wrong() -> None:
    assert LocalMixVR(inner_steps=100, alpha=0.07).minibatch == 7  # ceil(0.07 * 100) is 8


# ------------------------------------------------------------------------- what happens inside


@dataclass(frozen=True)
class Seen:
    """A worker just before step `t`: all [P], the averages taken where it is a synchronisation."""

    t: int
    iterate: Tensor
    average: Tensor
    estimator: Tensor


class Watched(LocalMixVR):
    """MixVR that notes what each worker has at each step."""

    def step(self, replica: Replica, state: DoubleMomentumState, t: int) -> None:
        seen = Seen(t, state.iterate.clone(), replica.parameters.clone(), state.estimator.clone())
        NOTES.setdefault(replica.worker, []).append(seen)
        super().step(replica, state, t)


NOTES: dict[int, list[Seen]] = {}


def watch(method: Watched, **given_: Any) -> dict[int, list[Seen]]:
    NOTES.clear()
    run(method, **given_)
    return dict(sorted(NOTES.items()))


class FullBatch(TinyMLP):
    """No noise: a worker sees the same samples always; its own, or all the same."""

    def __init__(self, common: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._common, self.dtype = common, dtype
        self._samples_of = TinyMLP()  # the same in either precision

    def train_batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._samples_of.train_batch(0 if self._common else worker, 0)
        return inputs.to(self.dtype), targets.to(self.dtype)


def gap_after_syncs(method: Watched, *, common: bool, rounds: int) -> list[float]:
    """max |d - mean_i grad F_i(x)| at each synchronisation; the truth is in fp64."""
    task = FullBatch(common)
    gradients = Gradients(FullBatch(common, torch.float64))
    eta = 0.3 if method.schedule == "constant" else 0.03
    training = Training(learning_rate=eta, schedule="constant")
    seen = watch(method, task=task, training=training, workers=4, rounds=rounds)
    gaps = []
    for index in range(method.local_steps, len(seen[0]), method.local_steps + 1):
        note = seen[0][index]
        truth = torch.stack([gradients(note.average.double(), i, 0) for i in range(4)]).mean(0)
        gaps.append(float((note.estimator.double() - truth).abs().max()))
    return gaps


NOISE_FREE: list[dict[str, Any]] = [
    {"schedule": "constant", "momentum": 0.9},
    {"schedule": "constant", "momentum": 0.5, "gamma": 0.6},
]


@pytest.mark.parametrize("settings_", [*NOISE_FREE, THEORY])
def test_without_noise_the_estimator_is_the_gradient_after_a_synchronisation(
    settings_: Any,
) -> None:
    method = Watched(inner_steps=10, alpha=0.1, **settings_)
    assert max(gap_after_syncs(method, common=False, rounds=1)) < 1e-6
    assert max(gap_after_syncs(method, common=True, rounds=4)) < 1e-6


class AtMeanOfPrevious(Watched):
    """Wrong: corrects from the mean of the workers' previous points."""

    async def _average_points(
        self, ctx: Context, round_: Round, state: DoubleMomentumState, start: Tensor | None
    ) -> Round:
        agreed = await super()._average_points(ctx, round_, state, start)
        return await all_reduce_until_complete(ctx, agreed, "previous", state.previous)


class AtCurrentLocal(Watched):
    """Wrong: corrects from the worker's current point before the average."""

    async def _average_points(
        self, ctx: Context, round_: Round, state: DoubleMomentumState, start: Tensor | None
    ) -> Round:
        local = ctx.replica.parameters.clone()
        agreed = await super()._average_points(ctx, round_, state, start)
        state.previous.copy_(local)
        return agreed


@pytest.mark.parametrize("wrong", [AtMeanOfPrevious, AtCurrentLocal])
@pytest.mark.parametrize("settings_", NOISE_FREE)
def test_the_wrong_corrections_miss_the_gradient(wrong: type[Watched], settings_: Any) -> None:
    (gap,) = gap_after_syncs(wrong(inner_steps=10, alpha=0.1, **settings_), common=False, rounds=1)
    assert gap > 1e-3


def test_without_the_drift_correction_the_estimator_lags_behind() -> None:
    method = Watched(inner_steps=10, alpha=0.1, momentum=0.9, drift_correction=False)
    (gap,) = gap_after_syncs(method, common=False, rounds=1)
    assert gap > 1e-3


def test_the_estimators_error_is_the_mean_of_all_noise_so_far() -> None:
    """With additive noise and beta_t = 1/t: eps_t = (1 - 1/t) eps_(t-1) + noise_t / t."""
    task = Quadratic(num_parameters=5, num_workers=1, noise=1.0, dtype=torch.float64)
    method = Watched(inner_steps=6, alpha=0.1, schedule="theory")
    (seen,) = watch(method, task=task, workers=1, rounds=3).values()
    for note in seen:
        truth = task.curvature * (note.average - task.optimum)
        noise = torch.stack([task.noise_at(0, step) for step in range(note.t)]).mean(0)
        assert torch.allclose(note.estimator - truth, noise, rtol=0, atol=1e-12)


def test_the_anytime_average_is_the_weighted_mean_of_the_iterates() -> None:
    seen = watch(Watched(inner_steps=5, alpha=0.2, schedule="theory"), workers=3, rounds=3)
    for index in range(15):
        notes = [notes[index] for notes in seen.values()]
        history = torch.stack(
            [torch.stack([n.iterate for n in notes[: index + 1]]) for notes in seen.values()]
        ).mean(0)
        weights = torch.arange(1, index + 2, dtype=torch.float64)
        expected = (weights[:, None] * history).sum(0) / weights.sum()
        found = torch.stack([note.average for note in notes]).mean(0)
        assert notes[0].t == index + 1
        assert torch.allclose(found, expected, rtol=0, atol=1e-14)


def test_theory_momenta_for_other_first_weights() -> None:
    for first in (1, 2, 5):
        total = first
        for t in range(1, 30):
            beta, gamma, weight = theory_momenta(t, first)
            assert (beta, weight) == (1 / (t - 1 + first), t - 1 + first)
            total += t + first
            assert gamma == pytest.approx((t + first) / total, rel=1e-14)


@pytest.mark.parametrize("settings_", [THEORY, CONSTANT])
def test_all_workers_hold_the_same_after_each_synchronisation(settings_: Any) -> None:
    method = Watched(inner_steps=5, alpha=0.4, **settings_)
    seen = watch(method, workers=3, rounds=3)
    for index in range(len(seen[0])):
        notes = [notes[index] for notes in seen.values()]
        is_sync = (index + 1) % (method.local_steps + 1) == 0
        for field in ("iterate", "average", "estimator"):
            values = [getattr(note, field) for note in notes]
            same = all(torch.equal(values[0], value) for value in values)
            fresh = index % (method.local_steps + 1) == 0 and field != "estimator"
            assert same == (is_sync or fresh), (index, field)


def test_the_average_drifts_less_than_the_iterate() -> None:
    seen = watch(Watched(inner_steps=8, alpha=0.1, schedule="theory"), workers=4, rounds=1)
    last = [notes[-2] for notes in seen.values()]  # the last local step
    spread = {
        field: float(torch.stack([getattr(n, field) for n in last]).var(0).sum())
        for field in ("iterate", "average")
    }
    assert 0 < spread["average"] < 0.5 * spread["iterate"]


# ------------------------------------------------------------------------------ costs and faults


class Counting(TinyMLP):
    """Counts what is loaded."""

    def __init__(self) -> None:
        super().__init__(dtype=torch.float64)
        self.loads: list[tuple[int, int]] = []

    def train_batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        self.loads.append((worker, step))
        return super().train_batch(worker, step)


def test_each_batch_is_loaded_once_for_both_gradients() -> None:
    task = Counting()
    result = run(LocalMixVR(inner_steps=6, alpha=0.3), task=task, workers=2, rounds=3)
    assert sorted(task.loads) == [(worker, step) for worker in range(2) for step in range(18)]
    assert result.summary["samples"] == 2 * 18 * task.batch_size


def test_three_vectors_in_two_blocking_phases_and_two_gradients_a_batch() -> None:
    workers, rounds, inner_steps = 4, 3, 6
    network = Network(bandwidth="1GB/s", latency="1s")
    result = run(
        LocalMixVR(inner_steps=inner_steps, alpha=0.3),
        task=TinyMLP(),
        workers=workers,
        rounds=rounds,
        network=network,
        timing=Timing(step_time=10.0),
    )
    size = result.parameters.shape[1]
    assert size % workers == 0  # the chunks are equal
    votes = rounds * (workers - 1)
    sent = 2 * (workers - 1) * size // workers * 4
    kinds = result.ledger.by_kind()
    assert kinds["points"] == workers * (rounds * 2 * sent + votes)
    assert kinds["estimator"] == workers * (rounds * sent + votes)
    assert set(kinds) == {"points", "estimator"}
    gradients = workers * (2 * inner_steps * rounds - 1)  # the first needs no old point
    assert result.summary["train_time_s"] == pytest.approx(10.0 * gradients / workers)
    # An all-reduce takes three latencies: values, results, votes.
    blocked = result.summary["blocked_time_s"]
    assert blocked == pytest.approx(rounds * 2 * 3 * 1.0, rel=0.01)


def test_without_the_average_only_two_vectors_are_sent() -> None:
    result = run(LocalMixVR(inner_steps=4, anytime_averaging=False), workers=2, rounds=1)
    size = result.parameters.shape[1] * 8
    assert result.ledger.by_kind() == {"points": 2 * (size + 1), "estimator": 2 * (size + 1)}


def test_a_round_of_nothing_but_the_minibatch_sends_only_the_estimator() -> None:
    method = LocalMixVR(inner_steps=4, alpha=0.9)
    assert method.local_steps == 0
    result = run(method, workers=3, measure=Measure(every=1))
    assert set(result.ledger.by_kind()) == {"estimator"}
    assert all(torch.equal(result.parameters[0], row) for row in result.parameters)


def test_it_runs_without_numerics_in_the_same_time() -> None:
    method = LocalMixVR(inner_steps=6, alpha=0.3)
    timing = Timing(step_time=0.5, jitter=0.3)
    real, none = (run(method, timing=timing, numerics=numerics) for numerics in ("real", "none"))
    assert none.summary["time_s"] == real.summary["time_s"]
    assert none.ledger.entries() == real.ledger.entries()
    assert none.parameters.is_meta


def test_links_that_fail_change_nothing_but_the_time() -> None:
    method = LocalMixVR(inner_steps=4, alpha=0.3)
    calm = run(method, rounds=6)
    network = Network(failure_probability=0.15, deadline="20s")
    stormy = run(method, rounds=6, network=network)
    assert stormy.summary["failed_transfers"] > 0
    assert torch.equal(stormy.parameters, calm.parameters)


@pytest.mark.parametrize("return_after", [None, 15.0])
def test_the_others_go_on_without_a_crashed_worker_and_take_it_back(return_after: Any) -> None:
    faults = Faults(crashes=[CrashAt(worker=2, start=9.0, return_after=return_after)])
    network = Network(deadline="20s")
    result = run(
        LocalMixVR(inner_steps=4, alpha=0.3),
        workers=4,
        rounds=12,
        faults=faults,
        timing=Timing(step_time=1.0),
        network=network,
    )
    alive = (0, 1, 2, 3) if return_after else (0, 1, 3)
    assert result.workers == alive
    assert all(torch.equal(result.parameters[0], result.parameters[w]) for w in alive)


def test_a_partition_only_delays() -> None:
    method = LocalMixVR(inner_steps=4, alpha=0.3)
    calm = run(method, workers=4, rounds=6)
    split = Partition(groups=[[0, 1], [2, 3]], start=2.0, duration=15.0)
    torn = run(method, workers=4, rounds=6, faults=Faults(partitions=[split]))
    assert torch.equal(torn.parameters, calm.parameters)


def test_divergence_names_worker_step_and_learning_rate() -> None:
    training = Training(learning_rate=1e30, schedule="constant")
    with pytest.raises(RunFailed, match="all workers are lost") as caught:
        run(LocalMixVR(inner_steps=4), task=TinyMLP(), training=training)
    text = str(caught.value)
    assert "of worker 2 is not finite after" in text
    assert "inner steps (learning rate 1e+30)" in text


# ------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"schedule": "theory", "momentum": 0.5}, 'momentum: needs schedule = "constant"'),
        ({"schedule": "theory", "gamma": 0.5}, 'gamma: needs schedule = "constant"'),
        ({"first_weight": 2}, 'first_weight: needs schedule = "theory"'),
        ({"gamma_weighs": "average", "gamma": 1.0}, "would never move x"),
        ({"anytime_averaging": False, "gamma": 0.5}, "would be ignored, as anytime_averaging"),
        ({"alpha": 0.0}, "greater than 0"),
        ({"alpha": 1.0}, "less than 1"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(given_: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalMixVR(**given_)
