"""Outer Nesterov momentum, in the form of PyTorch's `SGD(nesterov=True, dampening=0)`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gossamer.training.layout import gather, scatter

_BLOCK_VALUES = 1 << 17  # three of them fit a core's cache


def nesterov_step_(
    point: Tensor, velocity: Tensor, delta: Tensor, *, learning_rate: float, momentum: float
) -> None:
    """One outer step in place: `v <- mu v + Delta; z <- z - lr (Delta + mu v)`.

    Args:
        point: z, [P], the point the step is taken from; overwritten with the result.
        velocity: v, [P], zero before the first step; overwritten.
        delta: Delta, [P], outer gradient, start minus end, so that it is subtracted; kept.
        learning_rate: lr, outer learning rate. The effective rate is lr / (1 - mu).
        momentum: mu in [0, 1).
    """
    if point.is_meta:  # nothing to compute, and torch works out shapes at length
        return
    # Block by block, so that each is read from memory once: half the time on large models.
    blocks = 1 if point.is_meta else -(-point.numel() // _BLOCK_VALUES)
    vectors = (vector.tensor_split(max(1, blocks)) for vector in (point, velocity, delta))
    for z, v, d in zip(*vectors, strict=True):
        v.mul_(momentum).add_(d)
        z.add_(d, alpha=-learning_rate)
        z.add_(v, alpha=-learning_rate * momentum)


def nesterov_step_on_(
    point: Tensor,
    velocity: Tensor,
    slices: Sequence[slice],
    delta: Tensor,
    *,
    learning_rate: float,
    momentum: float,
) -> None:
    """The same on `slices` of z and v alone; `delta` is as `gather` gives it."""
    some, its_velocity = gather(point, slices), gather(velocity, slices)
    nesterov_step_(some, its_velocity, delta, learning_rate=learning_rate, momentum=momentum)
    scatter(point, slices, some)
    scatter(velocity, slices, its_velocity)
