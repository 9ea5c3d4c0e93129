"""Eager DiLoCo: its rule against a loop of modules, how far workers differ, and what it hides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.measure.settings import Measure
from gossamer.methods import DiLoCo, EagerDiLoCo, FactoredGossip, Method
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.engine import Engine
from gossamer.training.problems import PureNoise, TinyMLP
from gossamer.training.settings import Training

SGD = Training(optimizer="sgd", learning_rate=0.1, schedule="constant", clip_norm=0, weight_decay=0)
MLP = TinyMLP(dtype=torch.float64)


def run(method: Method, *, workers: int = 4, rounds: int = 5, **more: Any) -> SimulationResult:
    more.setdefault("task", MLP)
    more.setdefault("training", SGD)
    return simulate(method=method, workers=workers, rounds=rounds, measure=Measure(every=0), **more)


def textbook(engine: Engine, *, workers: int, rounds: int, inner_steps: int) -> list[list[Tensor]]:
    """Eager updates as anybody would write them: modules, and an outer SGD for each worker."""
    models = [copy.deepcopy(engine.model) for _ in range(workers)]
    outers = [torch.optim.SGD(m.parameters(), lr=0.7, momentum=0.9, nesterov=True) for m in models]
    before = [[torch.zeros_like(p) for p in m.parameters()] for m in models]
    for r in range(rounds):
        anchors = [[p.detach().clone() for p in m.parameters()] for m in models]
        for worker, model in enumerate(models):
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(r * inner_steps, (r + 1) * inner_steps):
                inner.zero_grad()
                MLP.loss(model, MLP.train_batch(worker, step)).backward()
                inner.step()
        now = [
            [a - p.detach() for a, p in zip(anchors[w], models[w].parameters(), strict=True)]
            for w in range(workers)
        ]
        for w, model in enumerate(models):
            for k, parameter in enumerate(model.parameters()):
                others = sum(before[j][k] for j in range(workers) if j != w)
                parameter.data, parameter.grad = anchors[w][k], (others + now[w][k]) / workers
            outers[w].step()
        before = now
    return [[p.detach() for p in model.parameters()] for model in models]


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_it_is_the_textbook_loop(rounds: int) -> None:
    result = run(EagerDiLoCo(inner_steps=3), rounds=rounds)
    engine = Engine(MLP, SGD, seed=0, total_steps=1, real=True)
    expected = textbook(engine, workers=4, rounds=rounds, inner_steps=3)
    for worker, tensors in enumerate(expected):
        mine = engine.layout.views(result.parameters[worker])
        for (name, _), value in zip(engine.model.named_parameters(), tensors, strict=True):
            assert torch.allclose(mine[name], value, rtol=0, atol=1e-13), (worker, name)
    assert float((result.parameters[0] - result.parameters[1]).abs().max()) > 1e-4


def test_one_worker_is_diloco() -> None:
    """The late average is then the own outer gradient of before, which is taken back whole."""
    adamw = Training(learning_rate=0.02, clip_norm=0)
    eager = run(EagerDiLoCo(inner_steps=3), workers=1, training=adamw)
    diloco = run(DiLoCo(inner_steps=3), workers=1, training=adamw)
    assert torch.equal(eager.parameters, diloco.parameters)


def latest_outer_gradient(task: PureNoise, worker: int, rounds: int, inner_steps: int) -> Tensor:
    """Of the last round: noise does not see the weights."""
    steps = range((rounds - 1) * inner_steps, rounds * inner_steps)
    return 0.1 * torch.stack([task.train_batch(worker, step) for step in steps]).sum(0)


def test_workers_differ_by_shares_of_their_latest_outer_gradients_alone() -> None:
    """Without momentum, all that was added eagerly before has been taken back."""
    task, method = PureNoise(50, dtype=torch.float64), EagerDiLoCo(inner_steps=2, outer_momentum=0)
    result = run(method, task=task, rounds=6)
    shared = [
        result.parameters[w] + 0.7 * latest_outer_gradient(task, w, 6, 2) / 4 for w in range(4)
    ]
    for row in shared:
        assert torch.allclose(row, shared[0], rtol=0, atol=1e-13)
    assert not torch.allclose(result.parameters[0], result.parameters[1], atol=1e-3)


def test_what_was_added_is_taken_back_when_a_worker_goes_for_good() -> None:
    task, method = PureNoise(50, dtype=torch.float64), EagerDiLoCo(inner_steps=2, outer_momentum=0)
    faults = Faults(crashes=(CrashAt(worker=3, start=5.0),))
    result = run(method, task=task, rounds=6, faults=faults, timing=Timing(step_time=1.0))
    assert result.workers == (0, 1, 2)
    shared = [
        result.parameters[w] + 0.7 * latest_outer_gradient(task, w, 6, 2) / 3 for w in range(3)
    ]
    for row in shared:
        assert torch.allclose(row, shared[0], rtol=0, atol=1e-13)


def test_who_returns_goes_on_from_its_donor() -> None:
    faults = Faults(crashes=(CrashAt(worker=2, start=5.0, return_after=3.0),))
    result = run(EagerDiLoCo(inner_steps=2), rounds=12, faults=faults, timing=Timing(step_time=1.0))
    assert result.workers == (0, 1, 2, 3)
    apart = float((result.parameters - result.parameters.mean(0)).abs().max())
    whole = run(EagerDiLoCo(inner_steps=2), rounds=12).parameters
    assert apart < 3 * float((whole - whole.mean(0)).abs().max())


@pytest.mark.parametrize(("megabits", "share"), [(100, 0.561), (200, 1.0)])
def test_it_hides_what_global_mix1_hides(megabits: int, share: float) -> None:
    """The published utilisation of GlobalM1 (algorithms 7.1): max(T, C) in place of T + C."""
    timing = Timing(step_time=2.355, parameters=1.4985e9, payload_dtype="bf16")
    network = Network(bandwidth=f"{megabits}Mbit/s", deadline="100000s")
    task, more = PureNoise(65536), {"timing": timing, "network": network, "numerics": "none"}
    eager, global_m1 = (
        run(method, task=task, workers=8, rounds=8, **more)
        for method in (
            EagerDiLoCo(inner_steps=100),
            FactoredGossip(inner_steps=100, mix1="global", mix2="none"),
        )
    )
    # There is nothing to send in the first round, and nobody waits for the last outer gradient.
    longest = eager.summary["time_s"] - 235.5
    assert 7 / 8 * global_m1.summary["time_s"] == pytest.approx(longest, rel=1e-3)
    assert 7 * 235.5 / longest == pytest.approx(share, abs=0.005)
    sent = eager.ledger.by_kind()["outer"] / (8 * 7 * 1.4985e9 * 2)
    assert sent == pytest.approx(2 * 7 / 8, rel=1e-6)
