"""The shape of the hard convex problem's additive noise."""

from __future__ import annotations

import pytest
import torch

from gossamer.errors import ConfigError
from gossamer.training.convex import HardConvex


@pytest.mark.parametrize("noise_power", [0.0, 0.5, 1.0])
def test_the_additive_noise_has_its_norm_and_falls_as_told(noise_power: float) -> None:
    task = HardConvex(8, noise=3.0, noise_power=noise_power, dtype=torch.float64)
    _, shifts = task.train_batches(4, 0, 2560)
    variances = shifts.pow(2).mean((0, 1))
    shape = torch.arange(1, 9, dtype=torch.float64) ** (-2 * noise_power)
    assert torch.allclose(variances, 9 * shape / shape.sum(), rtol=0.05)  # deviation 1.4 %


def test_noise_that_follows_the_curvature() -> None:
    task = HardConvex(6, power=2.0, noise_power=1.0, dtype=torch.float64)
    _, shifts = task.train_batches(4, 0, 2560)
    ratio = shifts.pow(2).mean((0, 1)) / task.curvature
    assert torch.allclose(ratio, ratio.mean().expand(6), rtol=0.06)


def test_a_negative_power_is_refused() -> None:
    with pytest.raises(ConfigError, match="noise_power must be finite and not negative, got -1"):
        HardConvex(4, noise_power=-1.0)
