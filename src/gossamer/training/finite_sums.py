"""Least squares and logistic regression on a finite set of samples, drawn with replacement.

The loss F is the mean over the set, so smoothness, noise and optimum are computed, not assumed: the
optimum to machine precision, and with it the excess loss of any point.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.seeding import torch_stream
from gossamer.training.convex import (
    BLOCK_STEPS,
    Blocks,
    Convex,
    check_not_negative,
    power_law,
)

_NEWTON_STEPS_MAX = 200


class FiniteSum(Convex[tuple[Tensor, Tensor]]):
    """F(w) = mean_i l(<a_i, w>, y_i) + ridge / 2 |w|^2 over `num_samples` samples (a_i, y_i).

    Features are Gaussian with variance j^-power in coordinate j. A batch is (rows [B, N],
    targets [B]), drawn uniformly with replacement.

    Attributes:
        rows, targets: all samples, fp64 [n, N] and [n].
        sample_smoothness: the largest Lipschitz constant of one sample's gradient.
    """

    sample_smoothness: float

    def __init__(
        self,
        num_parameters: int,
        num_samples: int,
        *,
        power: float,
        ridge: float,
        batch_size: int,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(num_parameters, batch_size=batch_size, seed=seed, dtype=dtype)
        if num_samples < 1:
            raise ConfigError(f"num_samples must be at least 1, got {num_samples}")
        check_not_negative({"power": power, "ridge": ridge})
        self.num_samples, self.power, self.ridge = num_samples, power, ridge
        scales = power_law(num_parameters, power).sqrt()
        source = torch_stream(seed, "features")
        shape = (num_samples, num_parameters)
        self.rows = torch.randn(shape, generator=source, dtype=torch.float64) * scales
        source = torch_stream(seed, "planted weights")
        planted = torch.randn(num_parameters, generator=source, dtype=torch.float64)
        self.planted = planted / math.sqrt(num_parameters)
        self.targets = self._draw_targets(self.rows @ self.planted)
        self._cast = (self.rows.to(dtype), self.targets.to(dtype))
        self._blocks = Blocks(self._draw_indices)
        self.optimum = self._find_optimum()
        self.optimal_loss = float(self._full_loss(self.optimum))
        curvature = torch.linalg.eigvalsh(self.rows.T @ self.rows / num_samples)
        factor = self._curvature_max()
        self.smoothness = factor * float(curvature.max()) + ridge
        self.sample_smoothness = factor * float(self.rows.pow(2).sum(1).max()) + ridge
        slopes = self._slope(self.rows @ self.optimum, self.targets)
        gradients = slopes[:, None] * self.rows + ridge * self.optimum
        self.noise_at_optimum = float(gradients.pow(2).sum(1).mean().sqrt())

    @abstractmethod
    def _draw_targets(self, clean: Tensor) -> Tensor:
        """Targets [n] for the planted model's outputs [n]."""

    @abstractmethod
    def _sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """l(output, target), elementwise."""

    @abstractmethod
    def _slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The derivative of l in the output, elementwise."""

    @abstractmethod
    def _curvature_max(self) -> float:
        """The largest second derivative of l in the output."""

    @abstractmethod
    def _find_optimum(self) -> Tensor:
        """w*, fp64 [N]."""

    def _draw_indices(self, seed: int, worker: int, block: int) -> Tensor:
        return torch.randint(
            self.num_samples,
            (BLOCK_STEPS, self.batch_size),
            generator=torch_stream(seed, "samples", worker, block),
        )

    def train_batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        """(rows [B, N], targets [B])."""
        block, place = self._blocks.at(self.noise_seed, worker, step)
        chosen = block[place]
        rows, targets = self._cast
        return rows[chosen], targets[chosen]

    def eval_batches(self) -> list[tuple[Tensor, Tensor]]:
        """All samples."""
        return [self._cast]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean loss over the batch, with the ridge."""
        rows, targets = batch
        weight: Tensor = model()
        loss: Tensor = self._sample_losses(rows @ weight, targets).mean()
        return loss + 0.5 * self.ridge * (weight**2).sum() if self.ridge else loss

    def _full_loss(self, points: Tensor) -> Tensor:
        """F at points [..., N], in fp64."""
        points = points.to(torch.float64)
        losses = self._sample_losses(points @ self.rows.T, self.targets)
        return losses.mean(-1) + 0.5 * self.ridge * (points**2).sum(-1)

    def full_gradient(self, points: Tensor) -> Tensor:
        """The gradient of F at points [..., N], fp64 of the same shape."""
        points = points.to(torch.float64)
        slopes = self._slope(points @ self.rows.T, self.targets)
        return slopes @ self.rows / self.num_samples + self.ridge * points

    def excess_loss(self, points: Tensor) -> Tensor:
        """F(w) - F(w*) of each of `points` [..., N], fp64 [...]; rounding about 1e-16."""
        return self._full_loss(points) - self.optimal_loss


class LeastSquares(FiniteSum):
    """Linear regression: l(z, y) = 1/2 (z - y)^2, with targets <a, planted> + label noise.

    The optimum solves the normal equations; the excess loss is the quadratic form about it, so
    that it is exact however small.

    Args:
        num_parameters: N.
        num_samples: n, N or more unless there is a ridge.
        label_noise: standard deviation of the targets about the planted model.
        power: features have variance j^-power in coordinate j.
        ridge: weight of 1/2 |w|^2.
        batch_size: samples in a batch.
        seed: of the problem; and of the order of samples where no run says otherwise.
        dtype: of the model, fp32 or fp64.
    """

    def __init__(
        self,
        num_parameters: int = 32,
        num_samples: int = 1024,
        *,
        label_noise: float = 0.5,
        power: float = 1.0,
        ridge: float = 0.0,
        batch_size: int = 1,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_not_negative({"label_noise": label_noise})
        self.label_noise = label_noise
        if num_samples < num_parameters and not ridge:
            raise ConfigError(
                f"{num_samples} samples do not determine {num_parameters} parameters; give as many "
                f"samples, or a ridge above 0"
            )
        super().__init__(
            num_parameters,
            num_samples,
            power=power,
            ridge=ridge,
            batch_size=batch_size,
            seed=seed,
            dtype=dtype,
        )

    def _draw_targets(self, clean: Tensor) -> Tensor:
        source = torch_stream(self.seed, "label noise")
        noise = torch.randn(clean.shape, generator=source, dtype=torch.float64)
        return clean + self.label_noise * noise

    def _sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs - targets) ** 2

    def _slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs - targets

    def _curvature_max(self) -> float:
        return 1.0

    def _find_optimum(self) -> Tensor:
        hessian = self.rows.T @ self.rows / self.num_samples
        self._hessian = hessian + self.ridge * torch.eye(self.num_parameters, dtype=torch.float64)
        slope = self.rows.T @ self.targets / self.num_samples
        optimum: Tensor = torch.linalg.solve(self._hessian, slope)
        return optimum

    def excess_loss(self, points: Tensor) -> Tensor:
        """1/2 (w - w*)^T H (w - w*) of each of `points` [..., N], fp64 [...]."""
        away = points.to(torch.float64) - self.optimum
        return 0.5 * ((away @ self._hessian) * away).sum(-1)


class LogisticRegression(FiniteSum):
    """l(z, y) = log(1 + exp(-y z)) with labels -1 and 1, drawn from the planted model.

    The optimum is found by Newton's method until the gradient is rounding.

    Args:
        num_parameters: N.
        num_samples: n.
        scale: the planted model's outputs have standard deviations of about `scale`; the larger it
            is, the surer are the labels.
        power: features have variance j^-power in coordinate j.
        ridge: weight of 1/2 |w|^2, above 0: data that a plane separates has no optimum without.
        batch_size: samples in a batch.
        seed: of the problem; and of the order of samples where no run says otherwise.
        dtype: of the model, fp32 or fp64.
    """

    def __init__(
        self,
        num_parameters: int = 32,
        num_samples: int = 1024,
        *,
        scale: float = 2.0,
        power: float = 1.0,
        ridge: float = 1e-3,
        batch_size: int = 1,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_not_negative({"scale": scale})
        if ridge <= 0:
            raise ConfigError(f"ridge must be above 0, got {ridge}")
        self.scale = scale
        super().__init__(
            num_parameters,
            num_samples,
            power=power,
            ridge=ridge,
            batch_size=batch_size,
            seed=seed,
            dtype=dtype,
        )

    def _draw_targets(self, clean: Tensor) -> Tensor:
        spread = float((self.planted**2 * power_law(self.num_parameters, self.power)).sum().sqrt())
        source = torch_stream(self.seed, "label noise")
        draws = torch.rand(clean.shape, generator=source, dtype=torch.float64)
        surety = torch.sigmoid(clean * (self.scale / spread))
        return torch.where(draws < surety, 1.0, -1.0).to(torch.float64)

    def _sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-outputs * targets)

    def _slope(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -targets * torch.sigmoid(-outputs * targets)

    def _curvature_max(self) -> float:
        return 0.25

    def _find_optimum(self) -> Tensor:
        point = torch.zeros(self.num_parameters, dtype=torch.float64)
        identity = torch.eye(self.num_parameters, dtype=torch.float64)
        best, best_norm = point, math.inf
        for _ in range(_NEWTON_STEPS_MAX):
            gradient = self.full_gradient(point)
            norm = float(gradient.norm())
            if norm >= best_norm and best_norm < 1e-12:
                return best  # below this there is only rounding
            if norm < best_norm:
                best, best_norm = point, norm
            surety = torch.sigmoid(self.rows @ point)
            weights = surety * (1 - surety) / self.num_samples
            hessian = self.rows.T @ (weights[:, None] * self.rows) + self.ridge * identity
            point = point - torch.linalg.solve(hessian, gradient)
        raise ConfigError(
            f"no optimum of the logistic regression was found (gradient {best_norm:g}); use a "
            f"larger ridge than {self.ridge:g}"
        )
