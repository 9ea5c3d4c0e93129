"""The learning rate as a function of the step, and optimizers on flat vectors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gossamer.training.optimizers import InnerOptimizer, learning_rate_at
from gossamer.training.settings import Training


def test_warm_up_is_linear_and_reaches_the_peak_with_its_last_step() -> None:
    training = Training(learning_rate=1.0, warmup_steps=4, schedule="constant")
    rates = [learning_rate_at(step, training, 10) for step in range(7)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


def test_the_cosine_starts_at_the_peak_after_the_warm_up_and_ends_at_its_floor() -> None:
    training = Training(learning_rate=2.0, warmup_steps=10, final_learning_rate=0.1)
    assert learning_rate_at(9, training, 110) == 2.0
    assert learning_rate_at(10, training, 110) == 2.0
    assert learning_rate_at(60, training, 110) == pytest.approx(2.0 * 0.55)  # half way
    assert learning_rate_at(35, training, 110) == pytest.approx(
        2.0 * (0.1 + 0.9 * (2 + math.sqrt(2)) / 4)  # a quarter: cos^2(pi / 8)
    )
    assert learning_rate_at(110, training, 110) == pytest.approx(0.2)
    assert learning_rate_at(10**6, training, 110) == pytest.approx(0.2)


def test_the_cosine_is_that_of_pytorch() -> None:
    training = Training(learning_rate=0.3, final_learning_rate=0.2)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=0.06)
    for step in range(40):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate_at(step, training, 40) == pytest.approx(expected, rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_the_horizon_can_be_set_apart_from_the_end_of_the_run() -> None:
    training = Training(learning_rate=1.0, schedule_steps=1000)
    assert learning_rate_at(5, training, 10) == learning_rate_at(
        5, Training(learning_rate=1.0), 1000
    )


GRADIENTS = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def flat_run(training: Training, dtype: torch.dtype, num_decayed: int) -> Tensor:
    parameters = torch.linspace(-1, 1, 7, dtype=dtype)
    gradient = torch.zeros(7, dtype=dtype)
    optimizer = InnerOptimizer(parameters, gradient, num_decayed, training)
    for step, values in enumerate(GRADIENTS):
        gradient.copy_(values)
        optimizer.step(0.1 / (1 + step))
    return parameters


@pytest.mark.parametrize("num_decayed", [0, 3, 7])
def test_adamw_follows_its_equations(num_decayed: int) -> None:
    """Loshchilov and Hutter: decoupled decay on the first elements, both moments debiased."""
    training = Training(beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.2)
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    decay = 0.2 * (torch.arange(7) < num_decayed).double()
    for step, g in enumerate(GRADIENTS):
        rate = 0.1 / (1 + step)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        update = (m / (1 - 0.8 ** (step + 1))) / ((v / (1 - 0.9 ** (step + 1))).sqrt() + 1e-3)
        x = x - rate * decay * x - rate * update
    result = flat_run(training, torch.float64, num_decayed)
    assert torch.allclose(result, x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_sgd_follows_its_equations(momentum: float) -> None:
    """PyTorch's: decay joins the gradient, v <- mu v + g with v_0 = g_0, x <- x - lr v."""
    training = Training(optimizer="sgd", momentum=momentum, weight_decay=0.2)
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)
    v = torch.zeros_like(x)
    decay = 0.2 * (torch.arange(7) < 3).double()
    for step, g in enumerate(GRADIENTS):
        v = momentum * v + g + decay * x
        x = x - 0.1 / (1 + step) * v
    assert torch.allclose(flat_run(training, torch.float64, 3), x, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "training",
    [Training(), Training(optimizer="sgd"), Training(optimizer="sgd", momentum=0.9)],
    ids=["adamw", "sgd", "momentum"],
)
def test_a_restored_optimizer_goes_on_with_the_same_bits_and_shares_nothing(
    training: Training,
) -> None:
    def start() -> tuple[Tensor, Tensor, InnerOptimizer]:
        parameters, gradient = torch.linspace(-1, 1, 7), torch.zeros(7)
        return parameters, gradient, InnerOptimizer(parameters, gradient, 3, training)

    parameters, gradient, optimizer = start()
    assert optimizer.state_tensors() == {}
    for values in GRADIENTS[:3]:
        gradient.copy_(values)
        optimizer.step(0.1)
    restored, other_gradient, other = start()
    restored.copy_(parameters)
    other.load_state_tensors(optimizer.state_tensors())
    for values in GRADIENTS[3:]:
        for flat, stepped in ((gradient, optimizer), (other_gradient, other)):
            flat.copy_(values)
            stepped.step(0.05)
    assert torch.equal(parameters, restored)
    mine, theirs = optimizer.state_tensors(), other.state_tensors()
    assert list(mine) == list(theirs)
    for name, value in mine.items():
        assert torch.equal(value, theirs[name])
        assert value.data_ptr() != theirs[name].data_ptr()


def test_loading_nothing_starts_afresh() -> None:
    """AdamW's first step is the rate against the gradient's sign, whatever came before."""
    parameters, gradient = torch.zeros(4), torch.ones(4)
    optimizer = InnerOptimizer(parameters, gradient, 2, Training(weight_decay=0.0))
    optimizer.step(0.1)
    optimizer.load_state_tensors({})
    parameters.zero_()
    gradient.fill_(-3.0)
    optimizer.step(0.1)
    assert torch.allclose(parameters, torch.full((4,), 0.1))
