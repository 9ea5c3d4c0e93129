"""The convex problems: gradients, optima, constants and noise against independent references."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.config import build_recipe, prepare
from gossamer.errors import ConfigError
from gossamer.methods import LocalSGD
from gossamer.sim.simulate import simulate
from gossamer.training.convex import BLOCK_STEPS, Convex, HardConvex
from gossamer.training.finite_sums import FiniteSum, LeastSquares, LogisticRegression
from gossamer.training.settings import Training
from gossamer.training.task import Counts, Prepares, Scores, Task

FP64 = torch.float64


def squares(**changes: Any) -> LeastSquares:
    return LeastSquares(7, 90, **{"ridge": 0.01, "seed": 3, "dtype": FP64} | changes)


def logistic(**changes: Any) -> LogisticRegression:
    return LogisticRegression(6, 80, **{"ridge": 0.01, "seed": 4, "dtype": FP64} | changes)


def hard(**changes: Any) -> HardConvex:
    return HardConvex(10, **{"seed": 5, "dtype": FP64} | changes)


MAKERS: dict[str, Callable[..., Convex[Any]]] = {
    "squares": squares,
    "logistic": logistic,
    "hard": hard,
}
every_problem = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def slope(task: Convex[Any], weight: Tensor, batch: Any) -> Tensor:
    """The gradient of the task's loss, by autograd."""
    model = task.build()
    with torch.no_grad():
        model.weight.copy_(weight)
    torch.autograd.backward(task.loss(model, batch))
    assert model.weight.grad is not None
    return model.weight.grad


def points(count: int, size: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(count, size, generator=torch.Generator().manual_seed(1), dtype=FP64)


# -------------------------------------------------------------------------------------- all of them


@every_problem
def test_optimum_is_where_the_loss_is_least(make: Callable[..., Convex[Any]]) -> None:
    task = make()
    full = task.eval_batches()[0]
    assert slope(task, task.optimum, full).norm() < 1e-14
    assert task.excess_loss(task.optimum).abs() < 1e-15
    for direction in points(20, task.num_parameters):
        for size in (1e-3, 0.1, 3.0):
            assert task.excess_loss(task.optimum + size * direction) > 0


@every_problem
def test_excess_loss_is_the_loss_on_everything_less_the_least(
    make: Callable[..., Convex[Any]],
) -> None:
    task = make()
    where = points(5, task.num_parameters)
    excess = task.excess_loss(where)
    assert excess.dtype == FP64
    for weight, value in zip(where, excess, strict=True):
        model = task.build()
        with torch.no_grad():
            model.weight.copy_(weight)
        loss = task.loss(model, task.eval_batches()[0])
        torch.testing.assert_close(loss - task.optimal_loss, value, atol=1e-14, rtol=1e-12)
        assert task.metrics(model, task.eval_batches()[0]) == {"excess_loss": float(value)}


@every_problem
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-2, 1.0, 30.0]))
def test_gradients_are_lipschitz_with_the_stated_constant_and_monotone(
    make: Callable[..., Convex[Any]], seed: int, scale: float
) -> None:
    task = make()
    source = torch.Generator().manual_seed(seed)
    one, other = scale * torch.randn(2, task.num_parameters, generator=source, dtype=FP64)
    full = task.eval_batches()[0]
    change = slope(task, one, full) - slope(task, other, full)
    assert change.norm() <= task.smoothness * (one - other).norm() * (1 + 1e-12)
    assert change @ (one - other) >= -1e-12


@every_problem
def test_batches_are_pure_and_differ_by_worker_step_and_seed(
    make: Callable[..., Convex[Any]],
) -> None:
    task, again, other = make(batch_size=3), make(batch_size=3), make(batch_size=3)
    other.prepare(num_workers=2, seed=99, num_steps=1)
    keys = [(w, t) for w in range(2) for t in (0, 1, BLOCK_STEPS - 1, BLOCK_STEPS, 5000)]

    def flat(problem: Convex[Any], key: tuple[int, int]) -> Tensor:
        return torch.cat([part.flatten() for part in problem.train_batch(*key)])

    drawn = {key: flat(task, key) for key in keys}
    torch.manual_seed(17)
    for key in reversed(keys):
        assert torch.equal(drawn[key], flat(again, key))
        assert not torch.equal(drawn[key], flat(other, key))
    for place, key in enumerate(keys):
        assert all(not torch.equal(drawn[key], drawn[late]) for late in keys[place + 1 :])
    again.prepare(num_workers=2, seed=99, num_steps=1)  # what it has drawn already is forgotten
    assert torch.equal(flat(again, keys[-1]), flat(other, keys[-1]))
    assert torch.equal(task.optimum, other.optimum)  # the run's seed is that of the noise alone


@every_problem
def test_a_problem_is_a_whole_task(make: Callable[..., Convex[Any]]) -> None:
    task = make(batch_size=3, dtype=torch.float32)
    for protocol in (Task, Counts, Prepares, Scores):
        assert isinstance(task, protocol)
    assert (task.unit, task.units_per_batch) == ("samples", 3)
    result = simulate(
        method=LocalSGD(inner_steps=8),
        task=task,
        workers=2,
        rounds=4,
        training=Training(optimizer="sgd", learning_rate=0.2, weight_decay=0, clip_norm=0),
    )
    mean = result.averaged["weight"]
    assert result.summary["eval_excess_loss"] == pytest.approx(float(task.excess_loss(mean)))
    assert result.summary["eval_excess_loss"] < float(task.excess_loss(torch.zeros_like(mean)))
    assert mean.dtype == torch.float32


@every_problem
def test_without_numerics_a_problem_has_shapes_only(make: Callable[..., Convex[Any]]) -> None:
    result = simulate(
        method=LocalSGD(inner_steps=2), task=make(), workers=2, rounds=1, numerics="none"
    )
    assert result.parameters.is_meta


# -------------------------------------------------------------------------------------- finite sums


def all_samples(task: FiniteSum) -> list[tuple[Tensor, Tensor]]:
    return [(row[None], target[None]) for row, target in zip(task.rows, task.targets, strict=True)]


@pytest.mark.parametrize("make", [squares, logistic])
def test_sample_gradients_average_to_the_full_gradient(make: Callable[..., FiniteSum]) -> None:
    task = make()
    weight = points(1, task.num_parameters)[0]
    each = torch.stack([slope(task, weight, sample) for sample in all_samples(task)])
    torch.testing.assert_close(each.mean(0), task.full_gradient(weight), atol=1e-14, rtol=1e-12)
    at_optimum = torch.stack([slope(task, task.optimum, sample) for sample in all_samples(task)])
    noise = at_optimum.pow(2).sum(1).mean().sqrt()
    assert task.noise_at_optimum == pytest.approx(float(noise), rel=1e-12)


@pytest.mark.parametrize("make", [squares, logistic])
def test_samples_are_drawn_uniformly_from_the_set(make: Callable[..., FiniteSum]) -> None:
    task = make(batch_size=30)
    place = {tuple(row.tolist()): i for i, row in enumerate(task.rows)}
    drawn = [task.train_batch(w, t) for w in range(2) for t in range(100)]
    seen = [place[tuple(row.tolist())] for rows, _ in drawn for row in rows]
    for rows, targets in drawn[:3]:
        for row, target in zip(rows, targets, strict=True):
            assert target == task.targets[place[tuple(row.tolist())]]
    counts = np.bincount(seen, minlength=task.num_samples)
    expected = 6000 / task.num_samples
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    spread = (2 * task.num_samples) ** 0.5
    assert abs(chi_squared - task.num_samples) < 5 * spread


def test_least_squares_optimum_is_numpys() -> None:
    for ridge in (0.0, 0.3):
        task = squares(ridge=ridge)
        n, size = task.rows.shape
        stacked = np.vstack([task.rows.numpy(), (ridge * n) ** 0.5 * np.eye(size)])
        targets = np.concatenate([task.targets.numpy(), np.zeros(size)])
        expected = np.linalg.lstsq(stacked, targets, rcond=None)[0]
        np.testing.assert_allclose(task.optimum.numpy(), expected, atol=1e-13)


def test_least_squares_smoothness_is_attained_and_its_excess_is_exact_when_tiny() -> None:
    task = squares()
    hessian = np.cov(task.rows.numpy().T, bias=True) + np.outer(*[task.rows.numpy().mean(0)] * 2)
    values, vectors = np.linalg.eigh(hessian + task.ridge * np.eye(7))
    assert task.smoothness == pytest.approx(values[-1], rel=1e-12)
    away = 1e-9 * torch.from_numpy(vectors[:, -1])
    expected = 0.5e-18 * values[-1]
    assert float(task.excess_loss(task.optimum + away)) == pytest.approx(expected, rel=1e-6)
    norms = (task.rows.numpy() ** 2).sum(1)
    assert task.sample_smoothness == pytest.approx(norms.max() + task.ridge, rel=1e-12)


def test_least_squares_targets_are_the_planted_model_plus_noise() -> None:
    task = LeastSquares(4, 40_000, label_noise=0.7, power=2.0, dtype=FP64)
    residual = task.targets - task.rows @ task.planted
    assert residual.std().item() == pytest.approx(0.7, rel=0.02)
    variances = task.rows.var(0)
    torch.testing.assert_close(variances, torch.tensor([1, 1 / 4, 1 / 9, 1 / 16], dtype=FP64),
                               rtol=0.04, atol=0)  # fmt: skip
    assert (task.optimum - task.planted).norm() < 0.05


def test_logistic_optimum_is_that_of_plain_newton() -> None:
    task = logistic()
    rows, signs = task.rows.numpy(), task.targets.numpy()
    assert set(signs) == {-1.0, 1.0}
    weight = np.zeros(6)
    for _ in range(30):  # the textbook's iteration, which converges at this ridge
        p = 1 / (1 + np.exp(-rows @ weight))
        gradient = rows.T @ (p - (signs + 1) / 2) / len(rows) + task.ridge * weight
        hessian = rows.T @ ((p * (1 - p))[:, None] * rows) / len(rows) + task.ridge * np.eye(6)
        weight = weight - np.linalg.solve(hessian, gradient)
    np.testing.assert_allclose(task.optimum.numpy(), weight, atol=1e-13)


@pytest.mark.parametrize("ridge", [1e-6, 1e-3, 10.0])
def test_logistic_optimum_is_found_where_a_plane_separates_the_labels(ridge: float) -> None:
    """Few samples in many dimensions, where without a ridge there would be none."""
    task = LogisticRegression(40, 30, scale=50.0, ridge=ridge, dtype=FP64)
    assert task.full_gradient(task.optimum).norm() < 1e-12


# ------------------------------------------------------------------------------- the hard problem


def test_hard_gradient_is_the_closed_form_and_that_of_the_loss() -> None:
    task = hard(asymmetry=0.3, noise=0.4, batch_size=2)
    for key in ((0, 0), (3, 70)):
        scales, shifts = task.train_batch(*key)
        for weight in points(4, 10):
            expected = [
                float(scale) * (1 / i) * (u if u >= 0 else 0.3 * u) + float(shift)
                for i, (u, scale, shift) in enumerate(
                    zip((weight - task.optimum).tolist(), scales, shifts, strict=True), start=1
                )
            ]
            got = slope(task, weight, (scales, shifts))
            np.testing.assert_allclose(got.numpy(), expected, atol=1e-14)
            torch.testing.assert_close(task.gradient(weight, scales, shifts), got)


def test_hard_noise_has_the_stated_moments() -> None:
    task = HardConvex(50, noise=0.8, multiplicative=0.6, dtype=FP64)
    scales, shifts = task.train_batches(4, 0, 500)
    assert set(scales.unique().tolist()) == {0.4, 1.6}
    assert scales.mean().item() == pytest.approx(1, abs=0.01)
    assert shifts.pow(2).sum(-1).mean().item() == pytest.approx(0.64, rel=0.02)
    pooled = HardConvex(50, noise=0.8, multiplicative=0.6, dtype=FP64, batch_size=4)
    scales, shifts = pooled.train_batches(4, 0, 500)
    assert scales.std().item() == pytest.approx(0.3, rel=0.02)
    assert shifts.pow(2).sum(-1).mean().item() == pytest.approx(0.16, rel=0.02)
    flat = shifts.flatten(0, 1)[:300]
    assert (flat.corrcoef() - torch.eye(300)).abs().max() < 6 / 50**0.5


def test_hard_batches_at_once_are_the_batches_one_by_one() -> None:
    task = hard(batch_size=2)
    for first, stop in ((0, 3), (60, 130), (64, 128), (200, 201)):
        scales, shifts = task.train_batches(3, first, stop)
        assert scales.shape == shifts.shape == (3, stop - first, 10)
        for worker in range(3):
            for place, step in enumerate(range(first, stop)):
                scale, shift = task.train_batch(worker, step)
                assert torch.equal(scales[worker, place], scale)
                assert torch.equal(shifts[worker, place], shift)


def test_gradient_descent_on_the_hard_problem_converges_like_one_over_the_rounds() -> None:
    task = HardConvex(20_000, asymmetry=1.0, dtype=FP64)
    weight = torch.zeros(20_000, dtype=FP64)
    no_noise = task.eval_batches()[0]
    losses = {}
    for step in range(1, 513):
        weight = weight - task.gradient(weight, *no_noise)
        losses[step] = float(task.excess_loss(weight))
    rounds = [16, 64, 256, 512]
    exponent = np.polyfit(np.log(rounds), np.log([losses[r] for r in rounds]), 1)[0]
    assert exponent == pytest.approx(-1, abs=0.02)
    steep = HardConvex(20_000, power=2.0, decay=1.5, asymmetry=1.0, dtype=FP64)
    weight = torch.zeros(20_000, dtype=FP64)
    values = []
    for step in range(1, 257):
        weight = weight - steep.gradient(weight, *no_noise)
        if step in (64, 256):
            values.append(float(steep.excess_loss(weight)))
    assert np.log(values[1] / values[0]) / np.log(4) == pytest.approx(-2, abs=0.06)


@pytest.mark.parametrize(("asymmetry", "is_biased"), [(1.0, False), (0.2, True)])
def test_local_steps_are_biased_exactly_where_curvature_differs(
    asymmetry: float, is_biased: bool
) -> None:
    """Noisy steps from the optimum: their mean stays there unless one side is flatter."""
    task = HardConvex(
        8, power=0.0, asymmetry=asymmetry, noise=8**0.5, multiplicative=0.0, dtype=FP64
    )
    weights = task.optimum.repeat(400, 1)
    for first in range(0, 40, 10):
        scales, shifts = task.train_batches(400, first, first + 10)
        for place in range(10):
            slopes = task.gradient(weights, scales[:, place], shifts[:, place])
            weights = weights - 0.3 * slopes
    away = weights - task.optimum
    error = float(away.std()) / (400 * 8) ** 0.5
    mean = float(away.mean())
    assert (mean < -10 * error) if is_biased else (abs(mean) < 4 * error)


def test_hard_smoothness_is_attained_along_the_first_coordinate() -> None:
    task = hard()
    no_noise = task.eval_batches()[0]
    above = task.optimum + torch.eye(10, dtype=FP64)[0]
    change = task.gradient(above, *no_noise) - task.gradient(task.optimum, *no_noise)
    assert float(change.norm()) == pytest.approx(task.smoothness, rel=1e-12)


def test_hard_problems_optimum_has_the_stated_shape() -> None:
    task = HardConvex(300, decay=0.5, radius=3.0, dtype=FP64)
    assert task.distance == pytest.approx(3.0)
    sizes = task.optimum.abs()
    torch.testing.assert_close(sizes / sizes[0], torch.arange(1, 301, dtype=FP64) ** -0.5)
    assert 100 < int((task.optimum > 0).sum()) < 200


# ----------------------------------------------------------------------------- recipes and refusals


@pytest.mark.parametrize("name", ["least_squares", "logistic_regression", "hard_convex"])
def test_a_recipe_makes_the_problem(name: str) -> None:
    tables = {
        "task": {"name": name, "dimension": 5, "precision": "fp64", "problem_seed": 8},
        "train": {"workers": 2, "rounds": 1, "batch_size": 3},
        "method": {"name": "local_sgd"},
        "seed": 6,
    }
    task = prepare(build_recipe(tables, base=Path.cwd())).task
    assert isinstance(task, Convex)
    assert (task.num_parameters, task.batch_size, task.dtype) == (5, 3, FP64)
    assert (task.seed, task.noise_seed) == (8, 6)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"name": "least_squares", "dimension": 50, "samples": 10}, "task: 10 samples do not"),
        ({"name": "logistic_regression", "ridge": 0}, "task.ridge: input should be greater than 0"),
        ({"name": "hard_convex", "asymmetry": 1.5}, "task.asymmetry"),
        ({"name": "hard_convex", "samples": 10}, "task.samples: unknown setting"),
        ({"name": "hard_convx"}, "unknown task 'hard_convx'; did you mean 'hard_convex'"),
    ],
)
def test_impossible_recipes_are_refused(task: dict[str, Any], message: str) -> None:
    tables = {"task": task, "method": {"name": "local_sgd"}}
    with pytest.raises(ConfigError, match=message):
        prepare(build_recipe(tables, base=Path.cwd()))


def test_a_sequence_length_is_not_ignored_in_silence() -> None:
    tables = {
        "task": {"name": "hard_convex"},
        "train": {"sequence_length": 64},
        "method": {"name": "local_sgd"},
    }
    with pytest.raises(ConfigError, match=r"train\.sequence_length: 64 would be ignored"):
        prepare(build_recipe(tables, base=Path.cwd()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HardConvex(0), "num_parameters must be at least 1, got 0"),
        (lambda: HardConvex(asymmetry=0.0), "asymmetry must be above 0"),
        (lambda: HardConvex(multiplicative=1.5), "multiplicative must be from 0 to 1"),
        (lambda: HardConvex(noise=float("nan")), "noise must be finite"),
        (lambda: LeastSquares(batch_size=0), "batch_size must be at least 1"),
        (lambda: LeastSquares(4, 0), "0 samples do not determine 4 parameters"),
        (lambda: LeastSquares(4, 0, ridge=1.0), "num_samples must be at least 1"),
        (lambda: LogisticRegression(ridge=0.0), "ridge must be above 0"),
        (lambda: LogisticRegression(power=-1.0), "power must be finite and not negative"),
    ],
)
def test_impossible_problems_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
