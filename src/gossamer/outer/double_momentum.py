"""The two momenta of mu^2-SGD, anytime averaging and STORM, as update rules in place.

Source: T. Dahan and K. Levy, "mu^2-SGD: Stable Stochastic Optimization via a Double Momentum
Mechanism", 2023, arXiv:2304.04172; A. Cutkosky, "Anytime Online-to-Batch", ICML 2019; A. Cutkosky
and F. Orabona, "Momentum-Based Variance Reduction in Non-Convex SGD" (STORM), NeurIPS 2019.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Momenta(NamedTuple):
    """What the two momenta are at one step.

    Args:
        beta: share of the new gradient in the estimator.
        gamma: share of the iterate w in the average x.
        weight: of the step, so that its size is `weight` times the learning rate.
    """

    beta: float
    gamma: float
    weight: float


def theory_momenta(t: int, first_weight: int = 1) -> Momenta:
    """The weights a_t = t - 1 + first_weight: beta = 1 / a_t, step a_t, and x their weighted mean.

    Args:
        t: the step, 1-based. Its gamma is the share that w_(t+1) takes in x_(t+1), which is
            a_(t+1) over the sum of a_1 .. a_(t+1): 2 / (t + 2) where the first weight is 1.
        first_weight: a_1.
    """
    weight = t - 1 + first_weight
    total = (t + 1) * (2 * first_weight + t) / 2
    return Momenta(1 / weight, (weight + 1) / total, float(weight))


def storm_(estimator: Tensor, gradient: Tensor, old_gradient: Tensor, *, beta: float) -> None:
    """`d <- g + (1 - beta) (d - g')`, in place.

    Args:
        estimator: d, [P], of the gradient at the old point; overwritten with that at the new one.
        gradient, old_gradient: g and g', [P], of the same samples at the new and the old point.
        beta: 1 forgets the past.
    """
    torch.add(gradient, estimator.sub_(old_gradient), alpha=1 - beta, out=estimator)


def plain_momentum_(estimator: Tensor, gradient: Tensor, *, beta: float) -> None:
    """`d <- beta g + (1 - beta) d`, in place: STORM without its correction."""
    estimator.mul_(1 - beta).add_(gradient, alpha=beta)


def anytime_(average: Tensor, iterate: Tensor, *, gamma: float) -> None:
    """`x <- gamma w + (1 - gamma) x`, in place.

    Args:
        average: x, [P]; overwritten.
        iterate: w, [P]; with gamma = 1, x becomes w exactly.
    """
    average.lerp_(iterate, gamma)
