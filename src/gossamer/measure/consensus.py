"""How far the workers' parameters lie apart."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 20  # fp64 scratch of 8 MB, whatever M and P are


def worker_mean(parameters: Tensor) -> Tensor:
    """The average model [P] of `parameters` [M, P], in their dtype, summed in fp64.

    Rows that are equal give exactly that row, whatever M is.
    """
    mean = torch.empty_like(parameters[0])
    width = max(1, _BLOCK_ELEMENTS // len(parameters))
    for start in range(0, len(mean), width):
        block = parameters[:, start : start + width].detach().to(torch.float64)
        mean[start : start + width] = block.mean(dim=0)
    return mean


def l2_consensus(parameters: Tensor) -> float:
    """Mean over unordered pairs of ||theta_i - theta_j||^2, for `parameters` [M, P].

    By the O(M P) form 2/(M - 1) sum_i ||theta_i - mean||^2, in fp64, a block of columns at a time.
    One worker gives 0. NaN or infinity in the parameters gives NaN: nothing is hidden.
    """
    num_workers, numel = parameters.shape
    if num_workers < 2:
        return 0.0
    width = max(1, _BLOCK_ELEMENTS // num_workers)
    total = 0.0
    for start in range(0, numel, width):
        block = parameters[:, start : start + width].detach().to(torch.float64)
        total += float((block - block.mean(dim=0)).square_().sum())
    return 2.0 / (num_workers - 1) * total
