"""Small problems with known answers: for tests, and for trying a method in a second."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.seeding import torch_stream


class Vector(nn.Module):
    """A model that is nothing but one weight vector [N], zero at first."""

    def __init__(self, num_parameters: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_parameters, dtype=dtype))

    def forward(self) -> Tensor:
        return self.weight


class Quadratic:
    """Worker m's loss is 1/2 (w - c_m)^T A (w - c_m) with diagonal A, plus <noise, w>.

    Their mean over the workers is 1/2 (w - c)^T A (w - c) + constant with c the mean of the c_m,
    so the optimum is c and the excess loss of w is known exactly. Evaluation gives the excess loss.

    Args:
        num_parameters: N.
        num_workers: M, of them with a c_m of their own.
        seed: of the optimum, the curvatures and the noise.
        noise: standard deviation of each coordinate of the gradient noise.
        heterogeneity: standard deviation of each coordinate of c_m - c.
        condition: largest curvature over smallest; they run from 1 / condition to 1.
        dtype: fp32 or fp64.
    """

    unit = "samples"
    units_per_batch = 1

    def __init__(
        self,
        num_parameters: int = 16,
        num_workers: int = 8,
        seed: int = 0,
        *,
        noise: float = 0.0,
        heterogeneity: float = 0.0,
        condition: float = 10.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        _check_sizes(num_parameters=num_parameters, num_workers=num_workers)
        _check_scales(noise=noise, heterogeneity=heterogeneity)
        if condition < 1:
            raise ConfigError(f"condition must be at least 1, got {condition}")
        self.num_parameters, self.num_workers, self.seed = num_parameters, num_workers, seed
        self.noise, self.dtype = noise, dtype
        generator = torch_stream(seed, "optimum")
        shifts = torch.randn(num_workers, num_parameters, generator=generator, dtype=dtype)
        shifts = heterogeneity * (shifts - shifts.mean(0))
        self.optimum = torch.randn(num_parameters, generator=generator, dtype=dtype)  # c, [N]
        self.optima = self.optimum + shifts  # c_m, [M, N]
        exponents = torch.rand(
            num_parameters, generator=torch_stream(seed, "curvature"), dtype=dtype
        )
        self.curvature = condition ** (-exponents)  # the diagonal of A, [N]

    def build(self) -> Vector:
        """The vector w, zero at first."""
        return Vector(self.num_parameters, self.dtype)

    def train_batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        """(c_m, noise), both [N]."""
        return self.optima[worker], self.noise_at(worker, step)

    def noise_at(self, worker: int, step: int) -> Tensor:
        """What is added to the gradient of a worker's step, [N]."""
        if self.noise == 0:
            return torch.zeros(self.num_parameters, dtype=self.dtype)
        generator = torch_stream(self.seed, "noise", worker, step)
        values = torch.randn(self.num_parameters, generator=generator, dtype=self.dtype)
        return self.noise * values

    def eval_batches(self) -> list[tuple[Tensor, Tensor]]:
        """(c, no noise): the loss on it is the excess loss."""
        return [(self.optimum, torch.zeros_like(self.optimum))]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """1/2 (w - centre)^T A (w - centre) + <noise, w>."""
        centre, noise = batch
        weight: Tensor = model()
        loss: Tensor = 0.5 * (self.curvature * (weight - centre) ** 2).sum()
        return loss + (noise * weight).sum()

    def excess_loss(self, weight: Tensor) -> Tensor:
        """Mean loss of the workers at `weight` [..., N] above its least value."""
        return 0.5 * (self.curvature * (weight - self.optimum) ** 2).sum(-1)


class PureNoise:
    """No signal: the gradient is Gaussian with variance sigma^2 per coordinate, whatever w is.

    Independent over workers, steps and coordinates. Workers that take H plain steps of rate eta
    from a common point are then 2 eta^2 sigma^2 H N apart in mean squared distance: the unit of
    the consensus bound of Factored Gossip DiLoCo.

    Args:
        num_parameters: N.
        sigma: standard deviation of each coordinate.
        seed: of the noise.
        dtype: fp32 or fp64.
    """

    unit = "samples"
    units_per_batch = 1

    def __init__(
        self,
        num_parameters: int = 1000,
        sigma: float = 1.0,
        seed: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        _check_sizes(num_parameters=num_parameters)
        _check_scales(sigma=sigma)
        self.num_parameters, self.sigma, self.seed = num_parameters, sigma, seed
        self.dtype = dtype

    def build(self) -> Vector:
        """The vector w, zero at first."""
        return Vector(self.num_parameters, self.dtype)

    def train_batch(self, worker: int, step: int) -> Tensor:
        """The gradient of this worker's step, [N]."""
        generator = torch_stream(self.seed, "noise", worker, step)
        return self.sigma * torch.randn(self.num_parameters, generator=generator, dtype=self.dtype)

    def eval_batches(self) -> list[Tensor]:
        """One batch of zeros: the loss is zero everywhere."""
        return [torch.zeros(self.num_parameters, dtype=self.dtype)]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """<noise, w>, whose gradient is the noise."""
        loss: Tensor = (batch * model()).sum()
        return loss


class TinyMLP:
    """Regression on a random teacher: a two-layer tanh network, so no identity holds by linearity.

    Args:
        num_inputs: inputs x, standard normal.
        num_hidden: units of the student; the teacher has as many.
        num_outputs: outputs; the predictions are they, read as logits.
        batch_size: samples in a batch.
        seed: of the teacher and the data.
        noise: standard deviation added to the targets.
        dtype: fp32 or fp64.
    """

    unit = "samples"

    def __init__(
        self,
        num_inputs: int = 6,
        num_hidden: int = 16,
        num_outputs: int = 4,
        *,
        batch_size: int = 16,
        seed: int = 0,
        noise: float = 0.1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        _check_sizes(num_inputs=num_inputs, num_hidden=num_hidden, num_outputs=num_outputs)
        _check_sizes(batch_size=batch_size)
        _check_scales(noise=noise)
        self.sizes = (num_inputs, num_hidden, num_outputs)
        self.batch_size, self.seed, self.noise, self.dtype = batch_size, seed, noise, dtype
        generator = torch_stream(seed, "teacher")
        self.inner = torch.randn(num_inputs, num_hidden, generator=generator, dtype=dtype)
        self.outer = torch.randn(num_hidden, num_outputs, generator=generator, dtype=dtype)
        self.outer /= num_hidden**0.5

    @property
    def units_per_batch(self) -> int:
        """Samples in one training batch."""
        return self.batch_size

    def build(self) -> nn.Sequential:
        """The student, with torch's own initialisation."""
        num_inputs, num_hidden, num_outputs = self.sizes
        return nn.Sequential(
            nn.Linear(num_inputs, num_hidden, dtype=self.dtype),
            nn.Tanh(),
            nn.Linear(num_hidden, num_outputs, dtype=self.dtype),
        )

    def train_batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        """(inputs [B, num_inputs], targets [B, num_outputs])."""
        return self._samples(self.batch_size, torch_stream(self.seed, "inputs", worker, step))

    def eval_batches(self) -> list[tuple[Tensor, Tensor]]:
        """Four fixed batches of 64 samples."""
        return [self._samples(64, torch_stream(self.seed, "held out", index)) for index in range(4)]

    def probe_batch(self) -> tuple[Tensor, Tensor]:
        """The first evaluation batch."""
        return self.eval_batches()[0]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Half the mean squared error."""
        inputs, targets = batch
        loss: Tensor = 0.5 * ((model(inputs) - targets) ** 2).mean()
        return loss

    def predict(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Outputs as logits, fp32 [B, num_outputs]."""
        logits: Tensor = model(batch[0])
        return logits.float()

    def _samples(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(count, self.sizes[0], generator=generator, dtype=self.dtype)
        clean = torch.tanh(inputs @ self.inner) @ self.outer
        errors = torch.randn(clean.shape, generator=generator, dtype=self.dtype)
        return inputs, clean + self.noise * errors


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} must be at least 1, got {size}")


def _check_scales(**scales: float) -> None:
    for name, scale in scales.items():
        if not 0 <= scale < float("inf"):
            raise ConfigError(f"{name} must be finite and not negative, got {scale}")
