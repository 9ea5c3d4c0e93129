"""Identities between methods (I1 to I6, I14), and DiLoCo against a textbook loop.

All in fp64 on a non-linear loss unless said otherwise.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.measure.settings import Measure
from gossamer.methods import DataParallel, DiLoCo, FactoredGossip, LocalSGD, Method
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.problems import PureNoise, Quadratic, TinyMLP
from gossamer.training.settings import Training

QUIET = Measure(every=0)


def run(method: Method, *, task: Any = None, workers: int = 8, rounds: int = 10, **more: Any):
    """A short fp64 run with AdamW inside."""
    more.setdefault("training", Training(learning_rate=0.02, clip_norm=0))
    task = task or TinyMLP(dtype=torch.float64)
    return simulate(method=method, task=task, workers=workers, rounds=rounds, measure=QUIET, **more)


def distance(a: SimulationResult, b: SimulationResult) -> float:
    return float((a.parameters - b.parameters).abs().max())


def test_i1_both_mixes_global_is_diloco():
    gossip = run(FactoredGossip(inner_steps=3, mix1="global", mix2="global"), rounds=30)
    diloco = run(DiLoCo(inner_steps=3), rounds=30)
    assert distance(gossip, diloco) < 2e-14
    assert float(diloco.parameters.std()) > 0.1  # it went somewhere


@pytest.mark.parametrize("mix1", ["none", "pair", "global"])
def test_i2_with_a_global_second_mix_the_first_is_a_no_op(mix1):
    gossip = run(FactoredGossip(inner_steps=3, mix1=mix1, mix2="global"))
    diloco = run(DiLoCo(inner_steps=3))
    assert torch.equal(gossip.parameters, diloco.parameters)


def test_i3_unit_outer_step_is_local_sgd():
    plain = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
    gossip = run(FactoredGossip(inner_steps=4, mix1="global", mix2="global", **plain))
    diloco = run(DiLoCo(inner_steps=4, **plain))
    local = run(LocalSGD(inner_steps=4))
    assert distance(gossip, local) < 1e-14
    assert distance(diloco, local) < 1e-14


def mean_by_recursion(task: PureNoise, *, workers: int, rounds: int, inner_steps: int, eta: float):
    """The worker mean that any doubly stochastic mixers must give: noise does not see weights."""
    mean = torch.zeros(task.num_parameters, dtype=torch.float64)
    velocity = torch.zeros_like(mean)
    for r in range(rounds):
        steps = range(r * inner_steps, (r + 1) * inner_steps)
        noise = sum(task.train_batch(w, s).double() for w in range(workers) for s in steps)
        delta = eta * noise / workers
        velocity = 0.9 * velocity + delta
        mean -= 0.7 * (delta + 0.9 * velocity)
    return mean


MIXERS = [
    ("none", "none"),
    ("pair", "none"),
    ("none", "pair"),
    ("pair", "pair"),
    ("global", "none"),
    ("global", "pair"),
    ("global", "global"),
]


CASES = [(*mixers, unit) for mixers in MIXERS for unit in (None, "worker", "transfer")]
CASES += [("global", "pair", "step"), ("pair", "global", "collective")]


@pytest.mark.parametrize(("mix1", "mix2", "failure_unit"), CASES)
def test_i4_i6_the_mean_is_conserved_by_any_mixers_with_and_without_failures(
    mix1, mix2, failure_unit
):
    workers = 7
    task = PureNoise(50, dtype=torch.float64)
    network = Network(
        failure_probability=0.2 if failure_unit else 0.0, failure_unit=failure_unit or "worker"
    )
    result = run(
        FactoredGossip(inner_steps=2, mix1=mix1, mix2=mix2),
        task=task,
        workers=workers,
        rounds=8,
        network=network,
        training=Training(
            optimizer="sgd", learning_rate=0.1, schedule="constant", clip_norm=0, weight_decay=0
        ),
    )
    expected = mean_by_recursion(task, workers=workers, rounds=8, inner_steps=2, eta=0.1)
    assert torch.allclose(result.parameters.mean(0), expected, rtol=0, atol=1e-13)
    if failure_unit in ("worker", "transfer") and (mix1, mix2) != ("none", "none"):
        assert result.summary["failed_transfers"] > 0


def test_i4_in_fp32_and_over_several_segments():
    task = PureNoise(20_000)
    result = run(
        FactoredGossip(inner_steps=1, mix1="global", mix2="pair"),
        task=task,
        workers=5,
        rounds=6,
        network=Network(failure_probability=0.2),
        training=Training(
            optimizer="sgd", learning_rate=0.1, schedule="constant", clip_norm=0, weight_decay=0
        ),
    )
    expected = mean_by_recursion(task, workers=5, rounds=6, inner_steps=1, eta=0.1)
    assert (result.parameters.double().mean(0) - expected).abs().max() < 5e-6


def test_i5_global_mix1_alone_is_diloco_in_the_mean_only_where_gradients_are_affine():
    alone = FactoredGossip(inner_steps=4, mix1="global", mix2="none")
    sgd = Training(optimizer="sgd", learning_rate=0.05, schedule="constant", clip_norm=0)
    affine = Quadratic(heterogeneity=1.0, dtype=torch.float64)
    one = run(alone, task=affine, training=sgd).parameters.mean(0)
    other = run(DiLoCo(inner_steps=4), task=affine, training=sgd).parameters.mean(0)
    assert torch.allclose(one, other, rtol=0, atol=1e-13)
    one = run(alone, training=sgd).parameters.mean(0)
    other = run(DiLoCo(inner_steps=4), training=sgd).parameters.mean(0)
    assert float((one - other).abs().max()) > 1e-5


class Permuted:
    """A task whose workers have exchanged their data."""

    def __init__(self, task: Any, order: list[int]) -> None:
        self._task, self._order = task, order
        self.build, self.loss, self.eval_batches = task.build, task.loss, task.eval_batches

    def train_batch(self, worker: int, step: int) -> Any:
        return self._task.train_batch(self._order[worker], step)


ORDER = [3, 0, 7, 1, 6, 2, 5, 4]


@pytest.mark.parametrize(("mix1", "mix2"), [("global", "none"), ("global", "global")])
def test_i14_permuting_workers_permutes_the_result(mix1, mix2):
    method = FactoredGossip(inner_steps=3, mix1=mix1, mix2=mix2)
    plain = run(method).parameters
    permuted = run(method, task=Permuted(TinyMLP(dtype=torch.float64), ORDER)).parameters
    assert torch.allclose(permuted, plain[ORDER], rtol=0, atol=1e-12)


def test_i14_the_mean_does_not_depend_on_which_worker_has_which_data():
    method = FactoredGossip(inner_steps=3, mix1="pair", mix2="pair")
    sgd = Training(optimizer="sgd", learning_rate=0.1, schedule="constant", clip_norm=0)
    task = PureNoise(50, dtype=torch.float64)
    plain = run(method, task=task, training=sgd).parameters
    permuted = run(method, task=Permuted(task, ORDER), training=sgd).parameters
    assert torch.allclose(permuted.mean(0), plain.mean(0), rtol=0, atol=1e-13)
    assert not torch.allclose(permuted, plain[ORDER])  # other pairs met


def textbook_diloco(task: Any, training: Training, *, workers: int, rounds: int, inner_steps: int):
    """DiLoCo as anybody would write it: modules, torch optimizers, and an outer SGD."""
    outer_model = reference_model(task)
    outer = torch.optim.SGD(outer_model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    models = [copy.deepcopy(outer_model) for _ in range(workers)]
    inners = [
        torch.optim.AdamW(
            [
                {"params": [p for p in m.parameters() if p.ndim >= 2], "weight_decay": 0.1},
                {"params": [p for p in m.parameters() if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=training.learning_rate,
            betas=(0.9, 0.95),
        )
        for m in models
    ]
    for r in range(rounds):
        for worker, (model, inner) in enumerate(zip(models, inners, strict=True)):
            for step in range(r * inner_steps, (r + 1) * inner_steps):
                inner.zero_grad()
                task.loss(model, task.train_batch(worker, step)).backward()
                inner.step()
        for index, anchor in enumerate(outer_model.parameters()):
            ends = torch.stack([list(m.parameters())[index].detach() for m in models])
            anchor.grad = anchor.detach() - ends.mean(0)
        outer.step()
        for model in models:
            model.load_state_dict(outer_model.state_dict())
    return outer_model


def reference_model(task: Any):
    """The initial weights that every run of this task and seed 0 starts from."""
    from gossamer.training.engine import Engine

    engine = Engine(task, Training(), seed=0, total_steps=1, real=True)
    return copy.deepcopy(engine.model)


@pytest.mark.parametrize("rounds", [1, 2, 6])
def test_diloco_is_the_textbook_loop(rounds):
    task = TinyMLP()
    training = Training(learning_rate=0.01, schedule="constant", clip_norm=0)
    result = run(DiLoCo(inner_steps=5), task=task, workers=4, rounds=rounds, training=training)
    model = textbook_diloco(task, training, workers=4, rounds=rounds, inner_steps=5)
    for name, value in model.state_dict().items():
        assert torch.allclose(result.averaged[name], value, rtol=0, atol=1e-6), name


def test_data_parallel_with_sgd_is_one_big_batch():
    task = TinyMLP(dtype=torch.float64)
    sgd = Training(optimizer="sgd", learning_rate=0.1, schedule="constant", clip_norm=0,
                   weight_decay=0)  # fmt: skip
    result = run(DataParallel(inner_steps=6), task=task, workers=3, rounds=2, training=sgd)
    model = reference_model(task)
    for step in range(12):
        loss = sum(task.loss(model, task.train_batch(w, step)) for w in range(3)) / 3
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
    for name, value in model.state_dict().items():
        assert torch.allclose(result.averaged[name], value, rtol=0, atol=1e-13), name


@pytest.mark.parametrize(
    "method",
    [
        DataParallel(inner_steps=3),
        LocalSGD(inner_steps=3),
        DiLoCo(inner_steps=3),
        FactoredGossip(inner_steps=3, mix1="global", mix2="global"),
    ],
)
def test_workers_that_must_agree_hold_the_same_bits(method):
    parameters: Tensor = run(method, workers=5).parameters
    assert all(torch.equal(parameters[0], row) for row in parameters)


def test_one_worker_is_a_legal_run_of_every_method():
    for method in (DataParallel, LocalSGD, DiLoCo, FactoredGossip):
        result = run(method(inner_steps=2), workers=1, rounds=2)
        assert result.summary["bytes_sent_total"] == 0
        assert result.summary["utilization"] == 1.0
