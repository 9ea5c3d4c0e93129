"""`Context.gradients`: gradients at points of a method's own choice, on batches loaded once."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.cluster.own_model import OwnModel
from gossamer.comm.context import Context, Round
from gossamer.errors import ConfigError, NonFiniteError
from gossamer.seeding import torch_stream
from gossamer.sim.compute import Timing
from gossamer.sim.faults import Faults, SlowPhase
from gossamer.testing import run_workers
from gossamer.training.engine import Engine
from gossamer.training.problems import Quadratic, TinyMLP, Vector
from gossamer.training.replica import Replica
from gossamer.training.settings import Training
from gossamer.training.task import Task


class Noisy:
    """Dropout and batch normalisation; draws from the global generator while it loads."""

    def __init__(self) -> None:
        self.loads: list[tuple[int, int]] = []

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.4), nn.Linear(5, 1)
        )

    def train_batch(self, worker: int, step: int) -> Tensor:
        self.loads.append((worker, step))
        inputs = torch.randn(8, 3, generator=torch_stream(1, worker, step))
        return inputs + 0.1 * torch.randn(8, 3)

    def eval_batches(self) -> list[Tensor]:
        return [self.train_batch(0, 0)]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        outputs: Tensor = model(batch)
        return ((outputs - 1) ** 2).mean()


def engine_of(task: Task, *, real: bool = True) -> tuple[Engine, Replica]:
    engine = Engine(task, Training(warmup_steps=10), seed=3, total_steps=20, real=real)
    return engine, engine.new_replicas(1)[1][0]


def shifted(replica: Replica, scale: float) -> Tensor:
    noise = torch.randn(replica.parameters.shape, generator=torch_stream(2, "shift"))
    return replica.parameters + scale * noise


def test_at_the_parameters_it_is_the_gradient_of_training() -> None:
    task = Noisy()
    engine, replica = engine_of(task)
    other = engine.new_replicas(1)[1][0]
    start = replica.buffers.clone()
    expected, loss = engine.gradient(other)
    expected = expected.clone()
    (found,), found_loss = engine.gradients(replica, [replica.parameters], 1)
    assert torch.equal(found, expected)
    assert found_loss == loss
    assert torch.equal(replica.buffers, other.buffers)
    assert torch.equal(replica.counters, other.counters)
    assert not torch.equal(replica.buffers, start)


def test_every_point_sees_the_same_samples_and_dropout() -> None:
    task = Noisy()
    engine, replica = engine_of(task)
    point = shifted(replica, 0.3)
    (first, again, moved), _ = engine.gradients(
        replica, [replica.parameters, replica.parameters, point], 1
    )
    assert torch.equal(first, again)
    engine, fresh = engine_of(task)
    (alone,), _ = engine.gradients(fresh, [point], 1)
    assert torch.equal(moved, alone)
    assert not torch.equal(moved, first)


def test_running_statistics_take_in_the_first_point_only() -> None:
    task = Noisy()
    engine, replica = engine_of(task)
    point = shifted(replica, 2.0)
    engine.gradients(replica, [replica.parameters, point], 3)
    _, alone = engine_of(task)
    engine.gradients(alone, [alone.parameters], 3)
    assert torch.equal(replica.buffers, alone.buffers)
    assert replica.counters.tolist() == [3]


def test_a_mean_over_batches_loads_each_once() -> None:
    task = Noisy()
    engine, replica = engine_of(task)
    points = [replica.parameters, shifted(replica, 0.3)]
    means, _ = engine.gradients(replica, points, 3)
    assert task.loads == [(0, 0), (0, 1), (0, 2)]
    assert (replica.steps_completed, replica.samples_completed) == (3, 3)
    assert replica.learning_rate == pytest.approx(engine.training.learning_rate * 3 / 10)
    _, other = engine_of(task)
    singles = [engine.gradients(other, points, 1)[0] for _ in range(3)]
    for index, mean in enumerate(means):
        expected = torch.stack([single[index] for single in singles]).mean(0)
        assert torch.allclose(mean, expected, rtol=0, atol=1e-6)


def test_the_replicas_parameters_are_neither_read_nor_written() -> None:
    engine, replica = engine_of(TinyMLP())
    points = [replica.parameters.clone()]
    replica.parameters.fill_(float("nan"))
    (found,), _ = engine.gradients(replica, points, 1)
    assert bool(torch.isfinite(found).all())
    assert bool(replica.parameters.isnan().all())


def test_points_are_read_at_the_call_and_another_task_may_write_meanwhile() -> None:
    async def work(ctx: Context, round_: Round) -> list[Tensor]:
        start = ctx.replica.parameters.clone()

        async with ctx.task_group() as tasks:
            asked = tasks.start(ctx.gradients([ctx.replica.parameters]))
            written = tasks.start(overwrite(ctx))
            (gradient,) = await asked
            await written
        assert bool((ctx.replica.parameters == 7.0).all())
        ctx.replica.parameters.copy_(start)
        return [gradient]

    async def overwrite(ctx: Context) -> None:
        ctx.replica.parameters.fill_(7.0)

    task = Quadratic(num_parameters=4, num_workers=2, heterogeneity=1.0)
    results = run_workers(2, work, task=task).results
    for worker, (gradient,) in results.items():
        expected = -task.curvature * task.optima[worker]  # at zero
        assert torch.allclose(gradient, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("jitter", [0.0, 0.5])
def test_time_is_that_of_a_step_for_each_batch_and_point(jitter: float) -> None:
    async def work(ctx: Context, round_: Round) -> tuple[float, float, int]:
        start = ctx.now()
        x = ctx.replica.parameters
        await ctx.gradients([x, x, x], 4)
        middle = ctx.now()
        return middle - start, middle, ctx.replica.steps_completed

    async def plain(ctx: Context, round_: Round) -> float:
        start = ctx.now()
        await ctx.train(4)
        return ctx.now() - start

    timing = Timing(step_time=0.25, jitter=jitter, speeds=[1.0, 0.5])
    found = run_workers(2, work, timing=timing).results
    once = run_workers(2, plain, timing=timing, training=Training(learning_rate=1e-3)).results
    for worker in (0, 1):
        assert found[worker][0] == pytest.approx(3 * once[worker], abs=1e-7)
        assert found[worker][2] == 4


def test_time_goes_through_slow_phases() -> None:
    async def work(ctx: Context, round_: Round) -> float:
        x = ctx.replica.parameters
        await ctx.gradients([x, x], 2)
        return ctx.now()

    faults = Faults(slow=[SlowPhase(worker=0, start=1.0, duration=100.0, factor=2.0)])
    results = run_workers(1, work, timing=Timing(step_time=1.0), faults=faults).results
    assert results[0] == pytest.approx(1.0 + 2 * 3.0)


def test_wrong_points_are_refused_before_time_passes() -> None:
    async def work(ctx: Context, round_: Round) -> list[str]:
        said = []
        for points, batches in (([], 1), ([torch.zeros(3)], 1), ([ctx.replica.parameters], 0)):
            with pytest.raises(ConfigError, match="gradients: ") as caught:
                await ctx.gradients(points, batches)
            said.append(str(caught.value))
        assert ctx.now() == 0.0
        return said

    said = run_workers(1, work).results[0]
    assert "points of shape [4] needed; got shapes []" in said[0]
    assert "got shapes [[3]]" in said[1]


def test_without_numerics_only_shapes_and_counts() -> None:
    engine, replica = engine_of(TinyMLP(), real=False)
    found, loss = engine.gradients(replica, [replica.parameters] * 2, 5)
    assert [(g.is_meta, g.shape) for g in found] == [(True, replica.parameters.shape)] * 2
    assert math.isnan(loss)
    assert replica.steps_completed == 5


@pytest.mark.parametrize("bad", [0, 1])
def test_a_point_that_is_not_finite_is_named(bad: int) -> None:
    async def work(ctx: Context, round_: Round) -> None:
        x = ctx.replica.parameters.clone()
        await ctx.gradients([x])
        points = [x, x.clone()]
        points[bad].fill_(float("inf"))
        await ctx.gradients(points)

    training = Training(learning_rate=0.125, schedule="constant")
    outcome = run_workers(2, only(1, work), training=training)
    (lost,) = outcome.lost
    assert lost["worker"] == 1
    assert "worker 1 is not finite after 1 inner steps (learning rate 0.125)" in lost["reason"]


class Root:
    """The loss is sqrt(|w|), 0 at the start, where its slope is infinite."""

    def build(self) -> nn.Module:
        return Vector(3, torch.float32)

    def train_batch(self, worker: int, step: int) -> None:
        return None

    def eval_batches(self) -> list[None]:
        return [None]

    def loss(self, model: nn.Module, batch: None) -> Tensor:
        return model().abs().sum().sqrt()  # type: ignore[no-any-return]


def test_a_gradient_that_is_not_finite_is_found_where_the_loss_is() -> None:
    engine, replica = engine_of(Root())
    with pytest.raises(NonFiniteError, match="gradient of worker 0 is not finite after 0 inner"):
        engine.gradients(replica, [replica.parameters], 1)


Work = Callable[[Context, Round], Awaitable[None]]


def only(victim: int, work: Work) -> Callable[[Context, Round], Coroutine[Any, Any, None]]:
    async def one(ctx: Context, round_: Round) -> None:
        if ctx.worker == victim:
            await work(ctx, round_)

    return one


def test_a_loop_of_ones_own_has_none() -> None:
    own = OwnModel(nn.Linear(2, 1), None, None)
    with pytest.raises(ConfigError, match="hands over parameters, not gradients"):
        own.check_points([own.replica.parameters], 1)
