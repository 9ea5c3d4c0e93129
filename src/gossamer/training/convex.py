"""Convex problems whose smoothness, noise and optimum are known, so that the excess loss is exact.

`HardConvex` is a stream without end on which the terms of the convergence theorems bite: gradient
descent needs all its rounds, local steps are biased, and the noise has an additive and a
multiplicative part. Least squares and logistic regression are in `finite_sums`.

All workers see the same distribution. The noise of a step is a function of (seed, worker, step),
drawn in blocks, so that a simulated run and a vectorised loop see the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.seeding import torch_stream
from gossamer.training.problems import Vector

BLOCK_STEPS = 64  # steps of a worker whose noise is drawn at a time

B = TypeVar("B")


class Convex(ABC, Generic[B]):
    """A convex loss F of one weight vector [N], zero at first, and what is known about it.

    Attributes:
        optimum: w*, fp64 [N].
        optimal_loss: F(w*).
        distance: |w*|, as all runs start at zero.
        smoothness: L, the Lipschitz constant of F's gradient.
        noise_at_optimum: sqrt(E |g(w*)|^2) of one sample's gradient.
    """

    unit = "samples"
    optimum: Tensor
    optimal_loss: float
    smoothness: float
    noise_at_optimum: float

    def __init__(
        self, num_parameters: int, *, batch_size: int, seed: int, dtype: torch.dtype
    ) -> None:
        for name, value in (("num_parameters", num_parameters), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.num_parameters, self.batch_size = num_parameters, batch_size
        self.seed, self.noise_seed, self.dtype = seed, seed, dtype

    @property
    def units_per_batch(self) -> int:
        """Samples in one training batch."""
        return self.batch_size

    @property
    def distance(self) -> float:
        """From the start to the optimum."""
        return float(self.optimum.norm())

    def build(self) -> Vector:
        """The vector w, zero at first."""
        return Vector(self.num_parameters, self.dtype)

    def prepare(self, *, num_workers: int, seed: int, num_steps: int) -> None:
        """The run's seed fixes the noise; the problem itself stays that of its own seed."""
        self.noise_seed = seed

    @abstractmethod
    def train_batch(self, worker: int, step: int) -> B:
        """What is random in a worker's step."""

    @abstractmethod
    def eval_batches(self) -> list[B]:
        """One batch, on which `loss` is F itself."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: B) -> Tensor:
        """Mean loss over a batch."""

    @abstractmethod
    def excess_loss(self, points: Tensor) -> Tensor:
        """F(w) - F(w*) of each of `points` [..., N], fp64 [...]."""

    def metrics(self, model: nn.Module, batch: B) -> dict[str, float]:
        """The excess loss, in fp64 whatever the model's precision is."""
        weight: Tensor = model()
        return {"excess_loss": float(self.excess_loss(weight.detach()))}


class Blocks(Generic[B]):
    """The latest block of each worker's draws; a block is drawn again when it is asked for again.

    Args:
        draw: (seed, worker, block index) -> the draws of its `BLOCK_STEPS` steps.
    """

    def __init__(self, draw: Callable[[int, int, int], B]) -> None:
        self._draw = draw
        self._kept: dict[int, tuple[tuple[int, int], B]] = {}

    def at(self, seed: int, worker: int, step: int) -> tuple[B, int]:
        """The block that holds `step`, and its place there."""
        index, place = divmod(step, BLOCK_STEPS)
        kept = self._kept.get(worker)
        if kept is None or kept[0] != (seed, index):
            kept = self._kept[worker] = ((seed, index), self._draw(seed, worker, index))
        return kept[1], place


class HardConvex(Convex[tuple[Tensor, Tensor]]):
    """F(w) = sum_i h_i phi(w_i - w*_i), where phi bends less on one side of the optimum.

        phi(u) = u^2 / 2 for u >= 0,  asymmetry u^2 / 2 for u < 0,     h_i = i^-power

    A sample adds noise to the gradient and scales it coordinate by coordinate:

        g_i(w) = (1 + multiplicative e_i) h_i phi'(w_i - w*_i) + noise s_i x_i,
        e_i = -1 or 1,  x_i standard normal, all independent;  s_i ~ i^-noise_power, |s| = 1

    so each sample's loss is convex, its gradient is (1 + multiplicative) Lipschitz, and both the
    variance of the gradient and that of the curvature are bounded, as the theorems assume. As the
    optimum's coordinates fall like i^-decay, plain gradient descent of rate 1 converges like
    R^-(1 + (2 decay - 1) / power): with decay = 1/2, like 1/R, until R^(1/power) reaches N. With
    asymmetry below 1 the mean of workers' local steps is biased against the step of their mean.

    Args:
        num_parameters: N.
        power: of the curvatures.
        asymmetry: curvature below the optimum as a share of that above, in (0, 1].
        noise: sqrt(E |.|^2) of the additive part.
        noise_power: how the additive part falls over the coordinates. With power / 2 its
            covariance is proportional to the curvature, as it is in regression; with 0 it is white.
        multiplicative: relative standard deviation of each curvature, in [0, 1].
        decay: of the optimum's coordinates, of random signs, scaled to |w*| = `radius`.
        radius: |w*|, the distance from the start.
        batch_size: samples in a batch.
        seed: of the optimum's signs; and of the noise where no run says otherwise.
        dtype: of the model, fp32 or fp64.

    A batch is (scales [N], shifts [N]): the means over its samples of 1 + multiplicative e and of
    the additive part.
    """

    def __init__(
        self,
        num_parameters: int = 64,
        *,
        power: float = 1.0,
        asymmetry: float = 0.2,
        noise: float = 1.0,
        noise_power: float = 0.0,
        multiplicative: float = 0.5,
        decay: float = 0.5,
        radius: float = 1.0,
        batch_size: int = 1,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(num_parameters, batch_size=batch_size, seed=seed, dtype=dtype)
        check_not_negative({"power": power, "noise": noise, "decay": decay, "radius": radius})
        check_not_negative({"noise_power": noise_power})
        if not 0 < asymmetry <= 1:
            raise ConfigError(f"asymmetry must be above 0 and at most 1, got {asymmetry}")
        if not 0 <= multiplicative <= 1:
            raise ConfigError(f"multiplicative must be from 0 to 1, got {multiplicative}")
        self.asymmetry, self.noise, self.multiplicative = asymmetry, noise, multiplicative
        self.curvature = power_law(num_parameters, power)  # h, fp64 [N]
        sizes = power_law(num_parameters, decay)
        coins = torch.randint(2, (num_parameters,), generator=torch_stream(seed, "signs"))
        self.optimum = radius * sizes / sizes.norm() * (2 * coins - 1)
        self.optimal_loss = 0.0
        self.smoothness = 1.0
        self.noise_at_optimum = noise
        shape = power_law(num_parameters, noise_power)
        self._deviations = (noise * shape / shape.norm()).to(dtype)  # of the additive part, [N]
        self._cast = (self.optimum.to(dtype), self.curvature.to(dtype))
        self._blocks = Blocks(self._draw_block)

    def _draw_block(self, seed: int, worker: int, block: int) -> tuple[Tensor, Tensor]:
        """Scales and shifts of the block's steps, each [BLOCK_STEPS, N]."""
        source = torch_stream(seed, "noise", worker, block)
        shape = (BLOCK_STEPS, self.batch_size, self.num_parameters)
        coins = torch.randint(2, shape, generator=source).to(self.dtype)
        scales = 1 + self.multiplicative * (2 * coins - 1).mean(1)
        shifts = torch.randn(shape, generator=source, dtype=self.dtype).mean(1)
        return scales, shifts * self._deviations

    def train_batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        """(scales [N], shifts [N]) of a worker's step."""
        (scales, shifts), place = self._blocks.at(self.noise_seed, worker, step)
        return scales[place], shifts[place]

    def train_batches(self, num_workers: int, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Those of steps `first` .. `stop` - 1 of all workers at once, each [M, stop - first, N].

        The same numbers as `train_batch` gives, for loops that are vectorised over workers.
        """
        blocks = range(first // BLOCK_STEPS, (stop - 1) // BLOCK_STEPS + 1)
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for worker in range(num_workers):
            drawn = [self._draw_block(self.noise_seed, worker, block) for block in blocks]
            for part, values in zip(parts, zip(*drawn, strict=True), strict=True):
                part.append(torch.cat(values)[first - blocks.start * BLOCK_STEPS :][: stop - first])
        return torch.stack(parts[0]), torch.stack(parts[1])

    def eval_batches(self) -> list[tuple[Tensor, Tensor]]:
        """No noise: the loss is the excess loss."""
        ones = torch.ones(self.num_parameters, dtype=self.dtype)
        return [(ones, torch.zeros_like(ones))]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The batch's mean loss, whose gradient `gradient` is."""
        scales, shifts = batch
        optimum, curvature = self._cast
        away = model() - optimum
        loss: Tensor = (0.5 * scales * curvature * self._bent(away) * away + shifts * away).sum()
        return loss

    def gradient(self, points: Tensor, scales: Tensor, shifts: Tensor) -> Tensor:
        """Gradients at points [..., N] under noise that broadcasts against them; their dtype."""
        optimum, curvature = self.optimum.to(points.dtype), self.curvature.to(points.dtype)
        away = points - optimum
        return scales * curvature * self._bent(away) + shifts

    def excess_loss(self, points: Tensor) -> Tensor:
        """F(w), which is zero at the optimum, of each of `points` [..., N]; fp64 [...]."""
        away = points.to(torch.float64) - self.optimum
        return 0.5 * (self.curvature * self._bent(away) * away).sum(-1)

    def _bent(self, away: Tensor) -> Tensor:
        """phi' of the distances from the optimum."""
        return torch.where(away >= 0, away, self.asymmetry * away)


def power_law(length: int, power: float) -> Tensor:
    """i^-power for i = 1 .. length, fp64."""
    return torch.arange(1, length + 1, dtype=torch.float64) ** -power


def check_not_negative(values: Mapping[str, float]) -> None:
    """Raise `ConfigError` for the first that is negative, infinite or NaN."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be finite and not negative, got {value}")
