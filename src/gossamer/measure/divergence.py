"""How far the workers' predictions lie apart: Jensen-Shannon, base 2.

Every function takes one fp32 log-softmax [N, V] per worker (N token positions, V classes) on the
same probe batch. A log-probability may be -inf; 0 log 0 counts as 0.

Source: arXiv 2606.22768, published as "Jensen-Shannon distance between the workers' per-token
output distributions"; the base, the square root and the order of the means are reconstructed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gossamer.errors import ConfigError

_CHUNK_ELEMENTS = 1 << 20  # probabilities of all workers together, in fp64: 8 MB


def js_distance(log_probs: Sequence[Tensor]) -> float:
    """Mean over tokens, then over unordered pairs of workers, of sqrt(JSD); in [0, 1].

    JSD = KL(p || m)/2 + KL(q || m)/2 with m = (p + q)/2, clamped at 0 before the square root.
    Fewer than two workers give 0.
    """
    num_workers = len(log_probs)
    if num_workers < 2:
        _check(log_probs)
        return 0.0
    matrix = js_distance_matrix(log_probs)
    return float(matrix.sum()) / (num_workers * (num_workers - 1))


def js_distance_matrix(log_probs: Sequence[Tensor]) -> Tensor:
    """[M, M] fp64 on the CPU: mean over tokens of sqrt(JSD) per pair; symmetric, diagonal 0."""
    num_workers = len(log_probs)
    sums = torch.zeros(num_workers, num_workers, dtype=torch.float64)
    num_tokens = _check(log_probs)
    for chunk in _chunks(log_probs):
        entropies = [_neg_entropy(p) for p in chunk]
        for i in range(num_workers):
            for j in range(i + 1, num_workers):
                middle = _neg_entropy((chunk[i] + chunk[j]).mul_(0.5))
                jsd = ((entropies[i] + entropies[j]) / 2 - middle) / math.log(2.0)
                sums[i, j] += float(jsd.clamp_(0.0, 1.0).sqrt_().sum())
    return (sums + sums.T) / num_tokens


def js_divergence_mway(log_probs: Sequence[Tensor]) -> float:
    """Mean over tokens of H(mean_i p_i) - mean_i H(p_i), in bits; in [0, log2 M].

    The cheap relative of `js_distance`: O(M) instead of O(M^2), a divergence and not a distance.
    With two workers and one token it is JSD, the square of the distance.
    """
    num_tokens = _check(log_probs)
    total = 0.0
    for chunk in _chunks(log_probs):
        mean = torch.stack(chunk).mean(dim=0)
        within = torch.stack([_neg_entropy(p) for p in chunk]).mean(dim=0)
        gap = (within - _neg_entropy(mean)) / math.log(2.0)
        total += float(gap.clamp_(min=0.0).sum())
    return total / num_tokens


def _neg_entropy(p: Tensor) -> Tensor:
    """sum_v p log p in nats per token: [n, V] -> [n]; `xlogy` takes 0 log 0 as 0."""
    return torch.xlogy(p, p).sum(dim=-1)


def _chunks(log_probs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Probabilities of all workers, fp64, renormalised, some tokens at a time.

    fp64 because JSD of near-equal predictions is a small difference of large sums: the square
    root of an fp32 rounding error would show as a distance of 1e-3 between equal models.
    Renormalised because an fp32 log-softmax sums to one only to fp32 rounding.
    """
    num_tokens, num_classes = log_probs[0].shape
    step = max(1, _CHUNK_ELEMENTS // (num_classes * len(log_probs)))
    for start in range(0, num_tokens, step):
        piece = [lp[start : start + step].detach().to(torch.float64).exp() for lp in log_probs]
        yield [p.div_(p.sum(dim=-1, keepdim=True)) for p in piece]


def _check(log_probs: Sequence[Tensor]) -> int:
    """The number of tokens; raises `ConfigError` where shapes do not allow a comparison."""
    shapes = [tuple(lp.shape) for lp in log_probs]
    if not shapes or len(shapes[0]) != 2 or any(s != shapes[0] for s in shapes) or 0 in shapes[0]:
        raise ConfigError(
            f"one [tokens, classes] tensor per worker, all of one shape, expected; got {shapes}"
        )
    return shapes[0][0]
