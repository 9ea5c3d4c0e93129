"""Merging the outer gradients of contributors that did unequal work.

Source: Decoupled DiLoCo (arXiv:2604.21428), as implementers describe it: its weights, and its
Radial-Directional Averaging. Whether that is taken per tensor, per fragment or over the whole
model is not published; here it is per tensor, as in public implementations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.errors import ConfigError

CANCELLED = 1e-6
"""A mean direction shorter than this has none: the weighted average is taken instead."""


def token_weight(tokens: float, steps: int) -> float:
    """tokens * (tokens / steps): how much was seen, times how much at once; 0 without a step."""
    if steps < 0 or tokens < 0:
        raise ConfigError(f"tokens and steps are 0 or more; got {tokens} and {steps}")
    return tokens * (tokens / steps) if steps else 0.0


def weighted_average(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_m w_m v_m / sum_m w_m, in a tensor of its own.

    Taken as the first vector plus the mean difference to it, weights relative to the largest: equal
    vectors give exactly that value, and equal weights the same bits as the unweighted mean.

    Args:
        vectors: equal shapes, at least one.
        weights: one each, 0 or more and finite, not all of them 0.

    Raises `ConfigError` where the weights are not so.
    """
    shares = _relative(vectors, weights)
    first = vectors[0]
    if first.is_meta:
        return torch.empty_like(first)
    if len(vectors) == 1:
        return first.clone()
    difference = torch.zeros_like(first)
    for vector, share in zip(vectors[1:], shares[1:], strict=True):
        difference.add_(vector - first, alpha=share)
    return difference.div_(sum(shares)).add_(first)


def radial_directional_average(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean direction at the mean length, in a tensor of its own.

        RDA = [sum w ||v|| / sum w] phi(sum w phi(v) / sum w),   phi(x) = x / ||x||, phi(0) = 0

    Averaging M nearly orthogonal vectors of length R gives length R / sqrt(M), which would change
    the best outer learning rate with M; this keeps R. Vectors whose directions cancel (a mean
    direction shorter than `CANCELLED`) are averaged plainly. Arguments and errors as in
    `weighted_average`.
    """
    shares = _relative(vectors, weights)
    first = vectors[0]
    if first.is_meta:
        return torch.empty_like(first)
    if len(vectors) == 1:
        return first.clone()
    norms = [float(torch.linalg.vector_norm(v, dtype=torch.float64)) for v in vectors]
    total = sum(shares)
    direction = torch.zeros_like(first)
    for vector, share, norm in zip(vectors, shares, norms, strict=True):
        if norm > 0:
            # In fp64, where the reciprocal of any fp32 norm is finite.
            direction.add_((vector.double() * (share / total / norm)).to(direction.dtype))
    length = float(torch.linalg.vector_norm(direction, dtype=torch.float64))
    if length < CANCELLED:
        return weighted_average(vectors, weights)
    radius = sum(share * norm for share, norm in zip(shares, norms, strict=True)) / total
    return direction.mul_(radius / length)


def merge_fragment(
    vectors: Sequence[Tensor],
    weights: Sequence[float],
    tensors: Sequence[slice],
    is_direct: Sequence[bool],
) -> Tensor:
    """Merge a fragment's outer gradients tensor by tensor.

    Args:
        vectors: one per contributor, flat [numel].
        weights: as in `weighted_average`.
        tensors: where each tensor lies in the fragment's vector; together all of it.
        is_direct: which of them are averaged plainly (embeddings, whose gradients are not
            orthogonal); the others by `radial_directional_average`.
    """
    merged = torch.empty_like(vectors[0])
    if merged.is_meta:
        return merged
    for piece, direct in zip(tensors, is_direct, strict=True):
        rule = weighted_average if direct else radial_directional_average
        merged[piece] = rule([vector[piece] for vector in vectors], weights)
    return merged


def _relative(vectors: Sequence[Tensor], weights: Sequence[float]) -> list[float]:
    """Weights over the largest."""
    if not vectors or len(vectors) != len(weights):
        raise ConfigError(f"{len(vectors)} vectors and {len(weights)} weights cannot be merged")
    largest = max(weights)
    if not all(0 <= weight < math.inf for weight in weights) or largest == 0:
        raise ConfigError(f"weights are 0 or more, finite, and not all 0; got {list(weights)}")
    return [weight / largest for weight in weights]
