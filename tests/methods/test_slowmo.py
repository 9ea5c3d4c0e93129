"""SlowMo and the methods that it becomes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.comm.context import Context, MethodState
from gossamer.errors import ConfigError
from gossamer.measure.settings import Measure
from gossamer.methods import DSGD, DataParallel, DiLoCo, LocalSGD, NoLoCo, SlowMo
from gossamer.methods.base import state_of
from gossamer.methods.slowmo import SlowMoState
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.problems import PureNoise, TinyMLP
from gossamer.training.settings import Training

SGD = Training(optimizer="sgd", learning_rate=0.1, schedule="constant", clip_norm=0, weight_decay=0)
ADAMW = Training(learning_rate=0.02, clip_norm=0, schedule="constant")
MLP = TinyMLP(dtype=torch.float64)
NOISE = PureNoise(20, dtype=torch.float64)


def run(method: Any, **given_: Any) -> SimulationResult:
    given_.setdefault("task", MLP)
    given_.setdefault("training", ADAMW)
    given_.setdefault("workers", 6)
    given_.setdefault("rounds", 8)
    return simulate(method=method, measure=Measure(every=0), **given_)


def assert_close(one: SimulationResult, other: SimulationResult, tolerance: float = 1e-12) -> None:
    assert torch.allclose(one.parameters, other.parameters, rtol=0, atol=tolerance)
    assert float(one.parameters.std()) > 0.05  # it went somewhere


def test_without_slow_momentum_it_is_local_sgd() -> None:
    decaying = Training(  # to exactly 0, before the end
        learning_rate=0.02, clip_norm=0, warmup_steps=5, final_learning_rate=0.0, schedule_steps=18
    )  # fmt: skip
    for training in (ADAMW, decaying):
        one = run(SlowMo(inner_steps=3, alpha=1.0, beta=0.0), training=training)
        assert_close(one, run(LocalSGD(inner_steps=3), training=training))


def test_one_step_with_plain_sgd_is_data_parallel_with_momentum() -> None:
    heavy = SGD.model_copy(update={"momentum": 0.6})
    one = run(SlowMo(inner_steps=1, alpha=1.0, beta=0.6), training=SGD, rounds=20)
    assert_close(one, run(DataParallel(inner_steps=1), training=heavy, rounds=20))


def test_noloco_in_one_group_of_all_is_slowmo() -> None:
    noloco = NoLoCo(inner_steps=3, alpha=0.6, beta=0.8, group_size=6)
    assert_close(run(noloco), run(SlowMo(inner_steps=3, alpha=0.8, beta=0.6)))


def by_definition(training: Training, *, learning_rates: list[float], beta: float) -> Tensor:
    """The rule on pure noise, whose gradients do not see the point."""
    x = torch.zeros(NOISE.num_parameters, dtype=torch.float64)
    u = torch.zeros_like(x)
    steps = len(learning_rates) // 8
    for r in range(8):
        mean = x.clone()
        for s in range(r * steps, (r + 1) * steps):
            noise = sum(NOISE.train_batch(w, s) for w in range(6)) / 6
            mean -= learning_rates[s] * noise
        last = learning_rates[(r + 1) * steps - 1]
        u = beta * u + (x - mean) / last
        x = x - 0.9 * last * u
    return x


@pytest.mark.parametrize("base", ["local", "gossip"])
def test_slowmo_under_a_schedule_is_its_definition(base: Any) -> None:
    warming = SGD.model_copy(update={"warmup_steps": 24})
    rates = [0.1 * (s + 1) / 24 for s in range(24)]
    result = run(
        SlowMo(inner_steps=3, alpha=0.9, beta=0.7, base=base), task=NOISE, training=warming
    )
    expected = by_definition(warming, learning_rates=rates, beta=0.7)
    assert torch.allclose(result.parameters, expected.expand(6, -1), rtol=0, atol=1e-13)


class Watched(SlowMo):
    """SlowMo whose last slow momentum can be looked at."""

    async def run(self, ctx: Context, state: MethodState) -> None:
        await super().run(ctx, state)
        MOMENTUM[ctx.worker] = state_of(SlowMoState, state).momentum


MOMENTUM: dict[int, Tensor] = {}


def test_dilocos_nesterov_is_slowmo_looked_at_one_momentum_ahead() -> None:
    alpha, beta = 0.7, 0.8
    slow = run(Watched(inner_steps=3, alpha=alpha, beta=beta), task=NOISE, training=SGD)
    diloco = run(
        DiLoCo(inner_steps=3, outer_learning_rate=alpha, outer_momentum=beta),
        task=NOISE, training=SGD,
    )  # fmt: skip
    ahead = slow.parameters - alpha * beta * 0.1 * MOMENTUM[0]
    assert torch.allclose(diloco.parameters, ahead, rtol=0, atol=1e-13)
    assert float((diloco.parameters - slow.parameters).abs().max()) > 1e-3


def test_gossip_steps_are_those_of_dsgd() -> None:
    slow = SlowMo(inner_steps=4, base="gossip", topology="ring", beta=0.0)
    dsgd = DSGD(inner_steps=4, topology="ring", order="adapt_then_combine")
    one, other = run(slow, rounds=1), run(dsgd, rounds=1)
    assert torch.allclose(one.parameters[0], other.parameters.mean(0), rtol=0, atol=1e-13)
    assert float(other.parameters.std(0).max()) > 1e-4
    assert all(torch.equal(one.parameters[0], row) for row in one.parameters)


def test_all_hold_the_same_bits_and_repeat_what_fails() -> None:
    result = run(SlowMo(inner_steps=2), network=Network(failure_probability=0.1))
    assert all(torch.equal(result.parameters[0], row) for row in result.parameters)
    assert result.summary["records"]["retries"]["count"] > 0
    assert torch.equal(result.parameters, run(SlowMo(inner_steps=2)).parameters)


def test_what_would_be_ignored_is_refused() -> None:
    with pytest.raises(ConfigError, match="topology, weights: used with base"):
        SlowMo(topology="ring")
    same = SlowMo(**SlowMo().model_dump())
    assert same == SlowMo()


def test_the_bytes_are_those_of_one_average() -> None:
    local = run(SlowMo(inner_steps=2), rounds=3).ledger
    average = run(LocalSGD(inner_steps=2), rounds=3).ledger
    assert local.entries() == average.entries()
    gossip = run(SlowMo(inner_steps=2, base="gossip"), rounds=3).ledger
    parameters = 6 * 16 + 16 + 16 * 4 + 4
    pairs = [(0, 1), (2, 3), (4, 5)]  # the hops of one, two and four places, of six workers
    pairs += [(0, 2), (1, 3), (0, 4), (1, 5)]
    assert gossip.total(kind="average") == average.total(kind="average")
    assert gossip.total(kind="mix") == 2 * len(pairs) * 2 * parameters * 8
