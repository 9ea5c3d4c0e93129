"""What is trained: the small protocol that any learning problem fits.

    class Quadratic:
        def build(self): return torch.nn.Linear(4, 1, bias=False)
        def loss(self, model, batch): return (model(batch) ** 2).mean()
        def train_batch(self, worker, step):
            source = torch.Generator().manual_seed(1000 * worker + step)
            return torch.randn(8, 4, generator=source)
        def eval_batches(self): return [torch.eye(4)]

is a whole task. Text and image tasks add predictions (for the Jensen-Shannon distance) and names
for their units; both are optional.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

Batch = Any  # whatever the task's own loss understands


@runtime_checkable
class Task(Protocol):
    """A learning problem."""

    def build(self) -> nn.Module:
        """A new model. Called under a generator seeded by the run, so its weights are fixed."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss over the batch, a scalar with gradient."""

    def train_batch(self, worker: int, step: int) -> Batch:
        """The training batch of a worker's inner step (0-based); a pure function of both."""

    def eval_batches(self) -> Iterable[Batch]:
        """The fixed held-out set, as batches of equal weight."""


@runtime_checkable
class Prepares(Protocol):
    """A task that wants to know the run before it starts (to cut its data into shards)."""

    def prepare(self, *, num_workers: int, seed: int, num_steps: int) -> None:
        """Called once before training; raises `ConfigError` where the run cannot be."""


@runtime_checkable
class Predicts(Protocol):
    """A task whose model gives a distribution over classes: enables the JS distance."""

    def predict(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits, [..., classes]."""

    def probe_batch(self) -> Batch:
        """The fixed held-out batch on which predictions are compared."""


@runtime_checkable
class Counts(Protocol):
    """A task that says what it counts."""

    @property
    def unit(self) -> str:
        """ "tokens" or "samples"."""

    @property
    def units_per_batch(self) -> int:
        """How many of them one training batch holds."""


@runtime_checkable
class Scores(Protocol):
    """A task with metrics beside the loss."""

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """For example {"accuracy": 0.91} on one evaluation batch."""
