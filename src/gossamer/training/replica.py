"""One worker's copy of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gossamer.training.layout import ParameterLayout


class KeepsMoments(Protocol):
    """The inner optimizer of a replica; see `InnerOptimizer`."""

    def step(self, learning_rate: float) -> None:
        """One update with the present gradient."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Its moments and counters by name; not copies."""

    def load_state_tensors(self, tensors: dict[str, Tensor], *, copy: bool = True) -> None:
        """Take over moments and counters; an empty dict starts afresh.

        Without `copy` the tensors are the optimizer's own from now on.
        """


@dataclass(eq=False)
class Replica:
    """Flat parameters, buffers and inner optimizer of one worker.

    Args:
        worker: whose replica it is.
        layout: where each tensor lies in `parameters`.
        parameters: [P], fp32 (fp64 where the model is); training and methods write to it in place.
        buffers: [B], the model's floating-point buffers, fp32 (fp64 where one of them is).
        counters: [I], int64, the model's integer buffers.
        optimizer: None on tensors without storage.
        steps_completed: inner steps done so far; the index of the next one.
        samples_completed: tokens or samples trained on so far.
        learning_rate: of the latest inner step.
    """

    worker: int
    layout: ParameterLayout
    parameters: Tensor
    buffers: Tensor
    counters: Tensor
    optimizer: KeepsMoments | None
    steps_completed: int = 0
    samples_completed: int = 0
    learning_rate: float = 0.0
