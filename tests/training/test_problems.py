"""The small problems against their closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.training.problems import PureNoise, Quadratic, TinyMLP
from gossamer.training.task import Batch, Counts, Predicts, Task


class Problem(Task, Counts, Protocol):
    """A task that counts."""


def gradient(task: Task, model: nn.Module, batch: Batch) -> Tensor:
    """The flat gradient of the loss on a batch."""
    values = torch.autograd.grad(task.loss(model, batch), list(model.parameters()))
    return torch.cat([value.flatten() for value in values])


def point(weight: Tensor, task: Quadratic | PureNoise) -> nn.Module:
    """A model at `weight`."""
    model = task.build()
    with torch.no_grad():
        model.weight.copy_(weight)
    return model


def test_quadratic_gradient_is_curvature_times_distance_plus_noise() -> None:
    task = Quadratic(
        12, 4, seed=1, noise=0.3, heterogeneity=0.5, condition=50.0, dtype=torch.float64
    )
    weight = torch.linspace(-2, 2, 12, dtype=torch.float64)
    for worker, step in ((0, 0), (3, 7)):
        got = gradient(task, point(weight, task), task.train_batch(worker, step))
        centre = task.optima[worker]
        expected = task.curvature * (weight - centre) + task.noise_at(worker, step)
        torch.testing.assert_close(got, expected, atol=1e-14, rtol=1e-14)


def test_quadratic_curvatures_lie_between_the_reciprocal_condition_and_one() -> None:
    task = Quadratic(2000, 1, condition=100.0)
    assert 0.01 <= task.curvature.min() < 0.011
    assert 0.95 < task.curvature.max() <= 1


def test_quadratic_optimum_is_that_of_the_mean_loss() -> None:
    """The mean of the workers' losses, less its value at the optimum, is the excess loss."""
    task = Quadratic(9, 5, seed=2, heterogeneity=1.5, dtype=torch.float64)

    def mean_loss(weight: Tensor) -> Tensor:
        model = point(weight, task)
        losses = [task.loss(model, task.train_batch(m, 0)) for m in range(5)]
        return torch.stack(losses).mean()

    weight = torch.arange(9, dtype=torch.float64)
    excess = mean_loss(weight) - mean_loss(task.optimum)
    torch.testing.assert_close(excess, task.excess_loss(weight))
    evaluated = task.loss(point(weight, task), task.eval_batches()[0])
    torch.testing.assert_close(evaluated, task.excess_loss(weight))
    assert task.excess_loss(task.optimum) == 0


def test_quadratic_gradient_descent_follows_its_closed_form() -> None:
    """w_t - c = (1 - rate x curvature)^t (w_0 - c)."""
    task = Quadratic(6, 1, seed=3, dtype=torch.float64)
    model = task.build()
    for step in range(20):
        slope = gradient(task, model, task.train_batch(0, step))
        with torch.no_grad():
            model.weight.sub_(0.5 * slope)
    expected = task.optimum - (1 - 0.5 * task.curvature) ** 20 * task.optimum
    torch.testing.assert_close(model.weight.detach(), expected)


def test_quadratic_heterogeneity_and_noise_have_the_stated_size() -> None:
    task = Quadratic(4000, 50, heterogeneity=2.0, noise=0.7)
    spread = (task.optima - task.optimum).pow(2).mean().sqrt()
    assert spread.item() == pytest.approx(2.0 * (49 / 50) ** 0.5, rel=0.01)
    noises = torch.stack([task.noise_at(m, step) for m in (0, 1) for step in range(25)])
    assert noises.std().item() == pytest.approx(0.7, rel=0.01)
    assert (noises.corrcoef() - torch.eye(50)).abs().max() < 5 / 4000**0.5  # all independent
    alike = Quadratic(5, 3)
    assert torch.equal(alike.optima, alike.optimum.expand(3, 5))


def test_pure_noise_gradient_is_the_batch_and_has_no_curvature() -> None:
    task = PureNoise(500, sigma=2.0, dtype=torch.float64)
    batch = task.train_batch(1, 2)
    for weight in (torch.zeros(500), torch.randn(500)):
        assert torch.equal(gradient(task, point(weight.double(), task), batch), batch)


def test_pure_noise_has_the_stated_variance_and_no_correlations() -> None:
    task = PureNoise(20_000, sigma=1.5)
    grads = torch.stack([task.train_batch(m, t) for m in range(4) for t in range(3)])
    covariance = grads @ grads.T / 20_000  # between (worker, step) pairs
    expected = 2.25 * torch.eye(12)
    # Entries scatter by sigma^2 sqrt(2/N) = 0.0225 at most; 5 of those.
    torch.testing.assert_close(covariance, expected, atol=0.115, rtol=0)
    assert grads.mean().abs() < 5 * 1.5 / (12 * 20_000) ** 0.5


def test_pure_noise_drives_two_workers_apart_as_the_bound_says() -> None:
    """After H steps of rate eta: E |y_i - y_j|^2 = 2 eta^2 sigma^2 H per coordinate."""
    task = PureNoise(20_000, sigma=0.5, seed=4)
    eta, num_steps = 0.1, 8
    grads = torch.stack([task.train_batch(m, t) for m in (0, 1) for t in range(num_steps)])
    ends = -eta * grads.view(2, num_steps, -1).sum(1)
    distance = ((ends[0] - ends[1]) ** 2).mean()
    assert distance.item() == pytest.approx(2 * eta**2 * 0.5**2 * num_steps, rel=0.04)


def test_mlp_targets_are_the_teachers_plus_noise() -> None:
    task = TinyMLP(noise=0.25, batch_size=4000, seed=5)
    inputs, targets = task.train_batch(0, 0)
    errors = targets - torch.tanh(inputs @ task.inner) @ task.outer
    assert errors.std().item() == pytest.approx(0.25, rel=0.03)
    assert inputs.std().item() == pytest.approx(1, rel=0.03)


def test_mlp_learns_and_is_not_linear() -> None:
    task = TinyMLP(seed=6, noise=0.0)
    torch.manual_seed(0)
    model = task.build()
    inputs = task.eval_batches()[0][0]
    offset = model(torch.zeros(1, 6))
    assert not torch.allclose(2 * (model(inputs) - offset), model(2 * inputs) - offset, atol=0.01)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    before = sum(task.loss(model, batch).item() for batch in task.eval_batches())
    for step in range(200):
        optimizer.zero_grad()
        torch.autograd.backward(task.loss(model, task.train_batch(step % 4, step)))
        optimizer.step()
    after = sum(task.loss(model, batch).item() for batch in task.eval_batches())
    assert after < 0.2 * before


def test_mlp_predictions_are_its_outputs() -> None:
    task = TinyMLP(dtype=torch.float64)
    assert isinstance(task, Predicts)
    model, probe = task.build(), task.probe_batch()
    logits = task.predict(model, probe)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, model(probe[0]).float())


MAKERS: list[Callable[[int, torch.dtype], Problem]] = [
    lambda seed, dtype: Quadratic(8, 3, seed, noise=0.1, heterogeneity=0.2, dtype=dtype),
    lambda seed, dtype: PureNoise(8, 1.0, seed, dtype=dtype),
    lambda seed, dtype: TinyMLP(seed=seed, dtype=dtype),
]


def flat(batch: Batch) -> Tensor:
    parts = batch if isinstance(batch, tuple) else (batch,)
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("make", MAKERS, ids=["quadratic", "noise", "mlp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batches_are_pure_and_of_the_asked_precision(
    make: Callable[[int, torch.dtype], Problem], dtype: torch.dtype
) -> None:
    task, again, other = make(0, dtype), make(0, dtype), make(1, dtype)
    assert isinstance(task, Counts)
    keys = [(worker, step) for worker in range(3) for step in (0, 1, 1000)]
    batches = {key: flat(task.train_batch(*key)) for key in keys}
    torch.manual_seed(99)
    for key in reversed(keys):
        assert torch.equal(batches[key], flat(again.train_batch(*key)))
        assert not torch.equal(batches[key], flat(other.train_batch(*key)))
        assert batches[key].dtype == dtype
    for i, key in enumerate(keys):
        assert all(not torch.equal(batches[key], batches[late]) for late in keys[i + 1 :])
    model = task.build()
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    assert task.loss(model, next(iter(task.eval_batches()))).dtype == dtype
    first, second = (flat(next(iter(task.eval_batches()))) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quadratic(0), "num_parameters must be at least 1, got 0"),
        (lambda: Quadratic(3, 0), "num_workers must be at least 1, got 0"),
        (lambda: Quadratic(noise=-1.0), "noise must be finite and not negative, got -1.0"),
        (lambda: Quadratic(heterogeneity=float("nan")), "heterogeneity must be finite"),
        (lambda: Quadratic(condition=0.5), "condition must be at least 1, got 0.5"),
        (lambda: PureNoise(0), "num_parameters must be at least 1, got 0"),
        (lambda: PureNoise(sigma=float("inf")), "sigma must be finite"),
        (lambda: TinyMLP(num_hidden=0), "num_hidden must be at least 1, got 0"),
        (lambda: TinyMLP(batch_size=0), "batch_size must be at least 1, got 0"),
        (lambda: TinyMLP(noise=-0.1), "noise must be finite"),
    ],
)
def test_impossible_problems_are_refused(make: Callable[[], Problem], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
