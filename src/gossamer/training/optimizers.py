"""The inner optimizer of one replica, and the learning rate of a step.

PyTorch's own optimizers, on the replica's flat vector instead of a list of tensors: one slice with
weight decay and one without, so that a step is one fused call for each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gossamer.training.settings import Training


def learning_rate_at(step: int, training: Training, total_steps: int) -> float:
    """The inner learning rate of a step, a function of the global step alone.

    Args:
        step: index of the inner step that is about to be done, 0-based.
        total_steps: inner steps in the run; the end of the cosine unless `schedule_steps` is set.
    """
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / training.warmup_steps
    if training.schedule == "constant":
        return training.learning_rate
    horizon = training.schedule_steps or total_steps
    progress = (step - training.warmup_steps) / max(1, horizon - training.warmup_steps)
    floor = training.final_learning_rate
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return training.learning_rate * (floor + (1 - floor) * cosine)


class InnerOptimizer:
    """A PyTorch optimizer on a flat vector.

    Args:
        parameters: [P], updated in place.
        gradient: [P], read at each step; may be shared with other replicas.
        num_decayed: the first so many elements have weight decay.
    """

    def __init__(
        self, parameters: Tensor, gradient: Tensor, num_decayed: int, training: Training
    ) -> None:
        self._slices: list[nn.Parameter] = []
        groups = []
        bounds = [(0, num_decayed, training.weight_decay), (num_decayed, parameters.numel(), 0.0)]
        for start, stop, weight_decay in bounds:
            if start < stop:
                piece = nn.Parameter(parameters[start:stop])
                piece.grad = gradient[start:stop]
                self._slices.append(piece)
                groups.append({"params": [piece], "weight_decay": weight_decay})
        self._optimizer = _build(groups, training)

    def step(self, learning_rate: float) -> None:
        """One update with the present gradient."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()

    def state_tensors(self) -> dict[str, Tensor]:
        """The moments and counters by name; empty before the first step. Not copies."""
        return {
            f"{index}.{key}": value
            for index, piece in enumerate(self._slices)
            for key, value in self._optimizer.state[piece].items()
            if isinstance(value, Tensor)
        }

    def load_state_tensors(self, tensors: dict[str, Tensor], *, copy: bool = True) -> None:
        """See `KeepsMoments.load_state_tensors`."""
        self._optimizer.state.clear()
        for name, value in tensors.items():
            index, _, key = name.partition(".")
            moment = value.clone() if copy else value
            self._optimizer.state[self._slices[int(index)]][key] = moment


def _build(groups: list[dict[str, object]], training: Training) -> torch.optim.Optimizer:
    if training.optimizer == "sgd":
        return torch.optim.SGD(
            groups, lr=training.learning_rate, momentum=training.momentum, fused=True
        )
    return torch.optim.AdamW(
        groups,
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.epsilon,
        fused=True,
    )
