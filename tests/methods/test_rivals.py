"""Local MixVR's rivals: textbook loops, reductions, costs, faults, resuming."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gossamer as gm
from gossamer.config import build_recipe, dump_recipe, load_recipe, prepare, variant
from gossamer.errors import ConfigError, Interrupted
from gossamer.measure.settings import Measure
from gossamer.methods import (
    AnytimeSGD,
    DiLoCo,
    FedAC,
    LocalMixVR,
    LocalMomentum,
    LocalSGD,
    Method,
    MinibatchASGD,
    MinibatchSGD,
    Mu2SGD,
    SlowcalSGD,
    Storm,
)
from gossamer.methods.base import training_of
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults
from gossamer.sim.listener import NullListener, StopFlag
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.engine import Engine
from gossamer.training.problems import TinyMLP
from gossamer.training.settings import Training

LR = 0.05
OWN = Training(learning_rate=LR, schedule="constant")
SGD = Training(
    optimizer="sgd", learning_rate=LR, schedule="constant", clip_norm=0, weight_decay=0
)  # fmt: skip
TASK = TinyMLP(dtype=torch.float64)
WORKERS, ROUNDS, K = 3, 4, 5

ALONE: list[Method] = [
    Mu2SGD(inner_steps=K),
    AnytimeSGD(inner_steps=K),
    Storm(inner_steps=K),
]
TOGETHER: list[Method] = [
    MinibatchSGD(inner_steps=K),
    MinibatchASGD(inner_steps=K),
    MinibatchASGD(inner_steps=K, form="ac_sa"),
    LocalMomentum(inner_steps=K),
    LocalMomentum(inner_steps=K, average_momentum=False),
    SlowcalSGD(inner_steps=K),
    FedAC(inner_steps=K),
]
VALUES_SENT = [1, 1, 1, 2, 1, 2, 2]  # in P, times 2 (M-1)/M


def named(method: Method) -> str:
    given = [str(value) for name, value in method if name in method.model_fields_set]
    return "-".join([method.name, *given[1:]])


def run(method: Method, **given: Any) -> SimulationResult:
    given.setdefault("task", TASK)
    given.setdefault("training", OWN)
    given.setdefault("measure", Measure(every=0))
    given.setdefault("workers", WORKERS)
    given.setdefault("rounds", ROUNDS)
    return simulate(method=method, **given)


class Plain:
    """The task's gradients, by autograd on a model of its own."""

    def __init__(self) -> None:
        self.engine = Engine(TASK, Training(), seed=0, total_steps=1, real=True)
        self.start = self.engine.new_replicas(1)[0][0].clone()

    def __call__(self, point: Tensor, worker: int, step: int) -> Tensor:
        layout, model = self.engine.layout, self.engine.model
        for name, value in layout.views(point).items():
            model.get_parameter(name).data = value.clone()
        loss = TASK.loss(model, TASK.train_batch(worker, step))
        named = dict(model.named_parameters())
        gradients = torch.autograd.grad(loss, [named[name] for name in layout.names])
        return torch.cat([gradient.flatten() for gradient in gradients])

    def of_round(self, point: Tensor, r: int) -> Tensor:
        """The mean over all workers' batches of a round."""
        batches = [(i, s) for i in range(WORKERS) for s in range(r * K, (r + 1) * K)]
        return torch.stack([self(point, *batch) for batch in batches]).mean(0)


def minibatch_sgd(g: Plain) -> Tensor:
    x = g.start
    for r in range(ROUNDS):
        x = x - LR * g.of_round(x, r)
    return x.expand(WORKERS, -1)


def nesterov(g: Plain) -> Tensor:
    x = torch.nn.Parameter(g.start.clone())
    optimizer = torch.optim.SGD([x], lr=LR, momentum=0.9, nesterov=True)
    for r in range(ROUNDS):
        x.grad = g.of_round(x.detach(), r)
        optimizer.step()
    return x.detach().expand(WORKERS, -1)


def ac_sa(g: Plain) -> Tensor:
    x = ag = g.start
    for t in range(1, ROUNDS + 1):
        a = 2 / (t + 1)
        md = (1 - a) * ag + a * x
        x = x - LR * t / 2 * g.of_round(md, t - 1)
        ag = (1 - a) * ag + a * x
    return ag.expand(WORKERS, -1)


def local(g: Plain, step: Callable[..., list[Tensor]], keep: int, size: int) -> Tensor:
    """Local steps on `size` vectors per worker, of which the first `keep` are averaged."""
    states = [[g.start, *[g.start] * (size - 1)] for _ in range(WORKERS)]
    for r in range(ROUNDS):
        for i in range(WORKERS):
            for s in range(r * K, (r + 1) * K):
                states[i] = step(states[i], lambda point, i=i, s=s: g(point, i, s), s + 1)
        means = [torch.stack([s[k] for s in states]).mean(0) for k in range(keep)]
        states = [[*means, *state[keep:]] for state in states]
    return torch.stack([state[0] for state in states])


def local_momentum(g: Plain, keep: int) -> Tensor:
    def step(state: list[Tensor], grad: Callable[[Tensor], Tensor], t: int) -> list[Tensor]:
        x, v = state
        v = grad(x) if t == 1 else 0.9 * v + grad(x)
        return [x - LR * v, v]

    return local(g, step, keep, 2)


def anytime(g: Plain, keep: int, *, uniform: bool = False) -> Tensor:
    def step(state: list[Tensor], grad: Callable[[Tensor], Tensor], t: int) -> list[Tensor]:
        x, w = state
        weights = [1.0 if uniform else float(s) for s in range(1, t + 2)]
        w = w - LR * weights[t - 1] * grad(x)
        share = weights[t] / sum(weights)
        return [(1 - share) * x + share * w, w]

    return local(g, step, keep, 2)


def storm(g: Plain) -> Tensor:
    def step(state: list[Tensor], grad: Callable[[Tensor], Tensor], t: int) -> list[Tensor]:
        x, old, d = state
        d = grad(x) if t == 1 else grad(x) + 0.9 * (d - grad(old))
        return [x - LR * d, x, d]

    return local(g, step, 0, 3)


def fedac(g: Plain) -> Tensor:
    mu = 0.01
    gamma = max(math.sqrt(LR / (mu * K)), LR)
    alpha = 1 / (gamma * mu)
    beta = alpha + 1

    def step(state: list[Tensor], grad: Callable[[Tensor], Tensor], t: int) -> list[Tensor]:
        ag, x = state
        md = x / beta + (1 - 1 / beta) * ag
        gradient = grad(md)
        return [md - LR * gradient, (1 - 1 / alpha) * x + md / alpha - gamma * gradient]

    return local(g, step, 2, 2)


TEXTBOOKS: list[tuple[Method, Callable[[Plain], Tensor]]] = [
    (TOGETHER[0], minibatch_sgd),
    (TOGETHER[1], nesterov),
    (TOGETHER[2], ac_sa),
    (TOGETHER[3], lambda g: local_momentum(g, 2)),
    (TOGETHER[4], lambda g: local_momentum(g, 1)),
    (TOGETHER[5], lambda g: anytime(g, 2)),
    (TOGETHER[6], fedac),
    (SlowcalSGD(inner_steps=K, weights="uniform"), lambda g: anytime(g, 2, uniform=True)),
    (AnytimeSGD(inner_steps=K), lambda g: anytime(g, 0)),
    (Storm(inner_steps=K), storm),
]


@pytest.mark.parametrize(
    ("method", "textbook"), TEXTBOOKS, ids=[named(method) for method, _ in TEXTBOOKS]
)
def test_each_rival_is_its_textbook_loop(
    method: Method, textbook: Callable[[Plain], Tensor]
) -> None:
    plain = Plain()
    expected = textbook(plain)
    found = run(method).parameters
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert float((found - plain.start).abs().max()) > 0.01


# ------------------------------------------------------------------------------------ reductions


def test_minibatch_sgd_of_one_batch_is_local_sgd_of_one_step() -> None:
    minibatch = run(MinibatchSGD(inner_steps=1))
    local_sgd = run(LocalSGD(inner_steps=1), training=SGD)
    assert torch.allclose(minibatch.parameters, local_sgd.parameters, rtol=0, atol=1e-14)


def test_nesterov_without_momentum_is_minibatch_sgd() -> None:
    plain = run(MinibatchASGD(inner_steps=K, momentum=0.0))
    assert torch.equal(plain.parameters, run(MinibatchSGD(inner_steps=K)).parameters)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_local_momentum_is_local_sgd_with_the_same_heavy_ball(momentum: float) -> None:
    method = LocalMomentum(inner_steps=K, momentum=momentum, average_momentum=False)
    training = SGD.model_copy(update={"momentum": momentum})
    inner = run(LocalSGD(inner_steps=K), training=training)
    assert torch.allclose(run(method).parameters, inner.parameters, rtol=0, atol=1e-13)


def test_slowcal_of_one_worker_is_anytime_sgd() -> None:
    slowcal = run(SlowcalSGD(inner_steps=K), workers=1)
    assert torch.equal(slowcal.parameters, run(AnytimeSGD(inner_steps=K), workers=1).parameters)


def test_slowcal_of_one_step_moves_w_as_minibatch_sgd_does() -> None:
    slowcal = run(SlowcalSGD(inner_steps=1), rounds=1)
    start = Plain().start
    step = run(MinibatchSGD(inner_steps=1), rounds=1).parameters - start
    assert torch.allclose(slowcal.parameters - start, step * 2 / 3, rtol=0, atol=1e-14)


def test_fedac_with_mu_of_one_over_eta_is_local_sgd() -> None:
    fedac_ = run(FedAC(inner_steps=K, strong_convexity=1 / LR))
    local_sgd = run(LocalSGD(inner_steps=K), training=SGD)
    assert torch.allclose(fedac_.parameters, local_sgd.parameters, rtol=0, atol=1e-13)


def test_storm_without_momentum_is_plain_sgd() -> None:
    storm_ = run(Storm(inner_steps=K, momentum=0.0), workers=1)
    plain = run(LocalSGD(inner_steps=K), workers=1, training=SGD)
    assert torch.allclose(storm_.parameters, plain.parameters, rtol=0, atol=1e-14)


# -------------------------------------------------------------------------------- costs and faults


@pytest.mark.parametrize("method", [*TOGETHER, *ALONE, LocalMixVR(inner_steps=K)], ids=named)
def test_all_use_the_same_samples(method: Method) -> None:
    loads: list[tuple[int, int]] = []

    class Counting(TinyMLP):
        def train_batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
            loads.append((worker, step))
            return super().train_batch(worker, step)

    result = run(method, task=Counting())
    assert sorted(loads) == [(i, s) for i in range(WORKERS) for s in range(ROUNDS * K)]
    assert result.summary["samples"] == WORKERS * ROUNDS * K * TASK.batch_size


@pytest.mark.parametrize(
    ("method", "values"), list(zip(TOGETHER, VALUES_SENT, strict=True)), ids=map(named, TOGETHER)
)
def test_bytes_and_time_are_those_that_the_file_says(method: Method, values: int) -> None:
    network = Network(bandwidth="1GB/s", latency="1s")
    result = run(method, network=network, timing=Timing(step_time=10.0))
    size = result.parameters.shape[1]
    assert size % WORKERS == 0
    vector = values * size * 8 * 2 * (WORKERS - 1) // WORKERS
    assert result.ledger.total() == WORKERS * ROUNDS * (vector + WORKERS - 1)
    assert result.summary["train_time_s"] == pytest.approx(10.0 * K * ROUNDS)
    assert result.summary["blocked_time_s"] == pytest.approx(3 * ROUNDS, rel=0.01)
    assert all(torch.equal(result.parameters[0], row) for row in result.parameters)


@pytest.mark.parametrize(("method", "gradients"), [(ALONE[0], 2), (ALONE[1], 1), (ALONE[2], 2)])
def test_those_that_work_alone_send_nothing(method: Method, gradients: int) -> None:
    result = run(method, timing=Timing(step_time=10.0))
    assert result.ledger.total() == 0
    evaluations = gradients * K * ROUNDS - (gradients - 1)
    assert result.summary["time_s"] == pytest.approx(10.0 * evaluations)
    assert not torch.equal(result.parameters[0], result.parameters[1])


@pytest.mark.parametrize("method", [*TOGETHER, *ALONE], ids=named)
def test_without_numerics_time_and_bytes_are_the_same(method: Method) -> None:
    timing = Timing(step_time=0.5, jitter=0.3)
    real, none = (run(method, timing=timing, numerics=kind) for kind in ("real", "none"))
    assert none.summary["time_s"] == real.summary["time_s"]
    assert none.ledger.entries() == real.ledger.entries()


@pytest.mark.parametrize("method", TOGETHER, ids=named)
def test_links_that_fail_change_nothing_but_the_time(method: Method) -> None:
    network = Network(failure_probability=0.2, deadline="20s")
    stormy = run(method, rounds=6, network=network)
    assert stormy.summary["failed_transfers"] > 0
    assert torch.equal(stormy.parameters, run(method, rounds=6).parameters)


@pytest.mark.parametrize("method", [*TOGETHER, *ALONE], ids=named)
def test_a_crashed_worker_takes_its_donors_state(method: Method) -> None:
    faults = Faults(crashes=[CrashAt(worker=2, start=9.0, return_after=15.0)])
    result = run(
        method,
        rounds=12,
        faults=faults,
        timing=Timing(step_time=1.0),
        network=Network(deadline="20s"),
    )
    assert result.workers == (0, 1, 2)
    assert [e["worker"] for e in result.history if e["kind"] == "joined"] == [2]
    if method in TOGETHER:
        assert all(torch.equal(result.parameters[0], row) for row in result.parameters)


class StopAfter(NullListener):
    """Asks the run to stop once it has reported round 2."""

    def __init__(self, stop: StopFlag) -> None:
        self._stop = stop

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "round" and fields["round"] >= 2:
            self._stop.request()


MIXVR = [
    LocalMixVR(inner_steps=K, alpha=0.4),
    LocalMixVR(inner_steps=K, alpha=0.4, schedule="theory"),
]


@pytest.mark.parametrize("method", [*TOGETHER, *ALONE, *MIXVR], ids=named)
def test_a_resumed_run_is_the_uninterrupted_one(method: Method, tmp_path: Path) -> None:
    fixed: dict[str, Any] = {
        "training": Training(learning_rate=LR, warmup_steps=7),
        "timing": Timing(step_time=1.0, jitter=0.3, speeds=[1.0, 0.8, 1.2]),
        "network": Network(failure_probability=0.1, deadline="60s"),
        "rounds": 6,
        "measure": Measure(every=2),
    }
    whole = run(method, **fixed)
    stop = StopFlag()
    with pytest.raises(Interrupted):
        run(method, checkpoint_dir=tmp_path, stop=stop, listener=StopAfter(stop), **fixed)
    resumed = run(method, resume=tmp_path, **fixed)
    assert torch.equal(resumed.parameters, whole.parameters)
    assert resumed.summary == whole.summary
    assert resumed.history == whole.history


# --------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"clip_norm": 0.5},
            r"train.clip_norm: 0.5 would be ignored: storm makes its steps itself",
        ),
        ({"clip_norm": 1.0}, r"leave it out, or set 0.0"),
        ({"weight_decay": 0.1}, "train.weight_decay: 0.1 would be ignored"),
        ({"optimizer": "sgd", "momentum": 0.9}, "train.momentum: 0.9 would be ignored"),
        ({"optimizer": "adamw"}, "train.optimizer: 'adamw' would be ignored"),
        ({"beta2": 0.99}, "train.beta2: 0.99 would be ignored"),
    ],
)
def test_what_an_own_step_would_ignore_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(Storm(inner_steps=2), training=Training(**given))
    assert training_of(DiLoCo(), Training(**given)) == Training(**given)


def test_what_is_in_force_is_what_is_written(tmp_path: Path) -> None:
    tables = {"method": {"name": "local_mixvr"}, "train": {"learning_rate": 0.05, "workers": 2}}
    recipe = build_recipe(tables, base=tmp_path)
    text = dump_recipe(recipe)
    for line in ('optimizer = "sgd"', "clip_norm = 0.0", "weight_decay = 0.0"):
        assert line in text
    (tmp_path / "again.toml").write_text(text)
    again = load_recipe(tmp_path / "again.toml")
    assert dump_recipe(again) == text
    inner = variant(recipe, "diloco")
    assert 'optimizer = "adamw"' in dump_recipe(inner)
    clipped = build_recipe({**tables, "train": {"clip_norm": 2.0}}, base=tmp_path)
    with pytest.raises(ConfigError, match=r"train.clip_norm: 2.0 would be ignored: local_mixvr"):
        prepare(clipped)
    assert prepare(variant(clipped, "diloco")).recipe.train.clip_norm == 2.0


def test_the_schedule_of_the_learning_rate_is_used() -> None:
    warm = Training(learning_rate=LR, schedule="constant", warmup_steps=1000)
    slow = run(MinibatchSGD(inner_steps=1), training=warm, rounds=2)
    plain = Plain()
    x = plain.start
    for r in range(2):
        batches = torch.stack([plain(x, i, r) for i in range(WORKERS)])
        x = x - LR * (r + 1) / 1000 * batches.mean(0)
    assert torch.allclose(slow.parameters[0], x, rtol=0, atol=1e-15)


def test_a_loop_of_ones_own_cannot_use_them() -> None:
    model = TASK.build()
    with pytest.raises(ConfigError, match=r"^local_mixvr makes its own steps from the gradients"):
        gm.join("127.0.0.1:1", method=LocalMixVR(), model=model)


def test_hyperparameters_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match='momentum: needs form = "nesterov"'):
        MinibatchASGD(form="ac_sa", momentum=0.5)
    with pytest.raises(ConfigError, match=r"at most 1/learning rate = 20 is possible; got 21"):
        run(FedAC(strong_convexity=21.0))
