"""Delayed Nesterov momentum: outer gradients count at once, their momentum once in n of them.

Source: B. Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024,
arXiv:2401.09135, with its c = 0 (known from summaries).
"""

from __future__ import annotations

from torch import Tensor


def delayed_nesterov_step_(
    point: Tensor,
    velocity: Tensor,
    pending: Tensor,
    delta: Tensor,
    *,
    learning_rate: float,
    momentum: float,
    delay: int,
    arrival: int,
) -> None:
    """`z <- z - lr Delta / n; A <- A + Delta`, and on every n-th arrival the momentum, in place:

        v <- mu v + A / n;  z <- z - lr mu v;  A <- 0

    So n arrivals are one Nesterov step on their mean; with n = 1 each is, bit for bit.

    Args:
        point: z, [P]; overwritten.
        velocity: v, [P], zero before the first arrival; overwritten.
        pending: A, [P], zero before the first arrival; overwritten.
        delta: Delta, [P], outer gradient, start minus end, so that it is subtracted; kept.
        learning_rate: lr.
        momentum: mu in [0, 1).
        delay: n, at least 1.
        arrival: which one this is, counted from 1.
    """
    if point.is_meta:  # nothing to compute, and torch works out shapes at length
        return
    point.add_(delta, alpha=-learning_rate / delay)
    pending.add_(delta)
    if arrival % delay == 0:
        velocity.mul_(momentum).add_(pending, alpha=1 / delay)
        point.add_(velocity, alpha=-learning_rate * momentum)
        pending.zero_()
