"""From a model's raw outputs to what the divergences compare."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.errors import ConfigError


def log_probabilities(logits: Tensor) -> Tensor:
    """fp32 log-softmax over the last dimension: [..., V] -> [N, V], N all leading positions."""
    if logits.ndim < 1 or logits.shape[-1] < 2:
        raise ConfigError(
            f"predictions need two classes or more in the last dimension; got {list(logits.shape)}"
        )
    flat = logits.detach().reshape(-1, logits.shape[-1])
    return torch.log_softmax(flat.to(torch.float32), dim=-1)
