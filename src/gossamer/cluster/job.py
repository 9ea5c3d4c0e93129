"""What a cluster run is: the part of a recipe that all of its processes must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from gossamer.cluster.context import Trains
from gossamer.comm.donation import Moments
from gossamer.methods.base import Method, training_of
from gossamer.training.engine import Engine
from gossamer.training.settings import Training
from gossamer.training.task import Prepares, Task

DEADLINE_S = 120.0  # unless the recipe's network.deadline says otherwise
KEEPALIVE_S = 3.5  # the same of network.keepalive


class Work(Protocol):
    """What a worker process must know of its run; `Job`, or a training loop of the user's own."""

    @property
    def method(self) -> Method:
        """How the workers agree."""

    @property
    def training(self) -> Training:
        """Of which the numbers of workers and rounds count here."""

    @property
    def seed(self) -> int:
        """Of the run."""

    @property
    def deadline_s(self) -> float:
        """Without a sign of life for so long a peer is lost."""

    @property
    def keepalive_s(self) -> float:
        """A transfer that moves nothing for so long has failed."""

    @property
    def step_time_s(self) -> float:
        """The least time of an inner step."""

    @property
    def checkpoint_every(self) -> int:
        """Rounds between checkpoints; 0: none."""

    @property
    def moments(self) -> Moments:
        """Whose inner moments a joiner takes."""

    @property
    def starts_differ(self) -> bool:
        """Whether new workers may begin with different parameters, and must take those of one."""

    @property
    def configuration(self) -> dict[str, Any]:
        """What two processes must have in common, as JSON."""

    def build_engine(self) -> Trains:
        """What does the numerics. Raises `ConfigError` where they do not fit the method."""


@dataclass(frozen=True)
class Job:
    """A method on a task.

    Args:
        deadline_s: after which an awaited message, or a worker without progress, counts as lost.
        keepalive_s: a transfer that moves nothing for so long has failed.
        step_time_s: the least time of an inner step, to play a larger model; 0: as fast as it goes.
        rejoin_moments: whose inner moments a joiner goes on with.
        checkpoint_every: rounds between a worker's checkpoints; 0: none.
        about_task: what must be the same of the task on all machines, as JSON.
    """

    method: Method
    task: Task
    training: Training
    seed: int = 0
    deadline_s: float = DEADLINE_S
    keepalive_s: float = KEEPALIVE_S
    step_time_s: float = 0.0
    rejoin_moments: Moments = "donor"
    checkpoint_every: int = 1
    about_task: Mapping[str, Any] = field(default_factory=dict)

    @property
    def starts_differ(self) -> bool:
        """No: all build the same model from the run's seed."""
        return False

    @property
    def moments(self) -> Moments:
        """Whose moments a joiner takes; methods that share them leave no choice."""
        return "donor" if self.method.moments_are_shared else self.rejoin_moments

    def build_engine(self) -> Engine:
        """Tell the task about the run, and build its model. Raises `ConfigError`."""
        total_steps = self.training.rounds * self.method.inner_steps
        if isinstance(self.task, Prepares):
            self.task.prepare(
                num_workers=self.training.workers, seed=self.seed, num_steps=total_steps
            )
        training = training_of(self.method, self.training)
        engine = Engine(self.task, training, seed=self.seed, total_steps=total_steps, real=True)
        self.method.validate_for(engine.layout, self.training.workers)
        return engine

    @cached_property
    def configuration(self) -> dict[str, Any]:
        """As JSON: what two processes must have in common to take part in one run."""
        return {
            "seed": self.seed,
            "method": {"name": self.method.name, **self.method.model_dump(mode="json")},
            "train": training_of(self.method, self.training).model_dump(mode="json"),
            "task": dict(self.about_task),
            "deadline_s": self.deadline_s,
            "keepalive_s": self.keepalive_s,
            "rejoin_moments": self.moments,
        }


def own_configuration(
    method: Method, *, workers: int, rounds: int, seed: int, deadline_s: float, moments: Moments
) -> dict[str, Any]:
    """The same for workers that train by loops of their own (`gossamer.join`)."""
    return {
        "seed": seed,
        "method": {"name": method.name, **method.model_dump(mode="json")},
        "train": {"workers": workers, "rounds": rounds},
        "task": {"name": "own"},
        "deadline_s": deadline_s,
        "rejoin_moments": moments,
    }
