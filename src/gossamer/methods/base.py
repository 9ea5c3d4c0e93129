"""What every method is: hyperparameters, a state, and one async loop per worker.

A method file reads like its paper's algorithm box. It touches the world through `Context` only.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, TypeVar

from pydantic import Field

from gossamer.comm.context import Context, MethodState
from gossamer.errors import ConfigError
from gossamer.settings import Settings
from gossamer.training.layout import ParameterLayout
from gossamer.training.replica import Replica

S = TypeVar("S", bound=MethodState)

SHARED: dict[str, Any] = {"shared": True}
"""Marks a hyperparameter that comparisons carry over from one method to the next."""


class Method(Settings):
    """Hyperparameters of a method, and the method itself.

    A subclass gives its registered `name`, its `State`, how the state starts, and the loop `run`,
    which each worker executes once from the first round (or the round it resumes or joins at) to
    the last.
    """

    name: ClassVar[str]
    State: ClassVar[type[MethodState]]

    inner_steps: int = Field(
        100,
        ge=1,
        description="H, inner steps in a round",
        json_schema_extra=SHARED,
    )

    @abstractmethod
    def init(self, replica: Replica) -> MethodState:
        """The state before the first round; tensors of its own, never views of the replica."""

    @abstractmethod
    async def run(self, ctx: Context, state: MethodState) -> None:
        """One worker's loop over `ctx.rounds(state)`."""

    def validate_for(self, layout: ParameterLayout, num_workers: int) -> None:
        """Raise `ConfigError` where these hyperparameters do not fit the model or the run."""

    def needs_numerics(self) -> str | None:
        """Why this method cannot run without numerics, or None where it can."""
        return None

    @property
    def moments_are_shared(self) -> bool:
        """Whether all workers hold the same inner moments, so that a joiner must take a donor's."""
        return False

    @property
    def overlaps(self) -> bool:
        """Whether part of the communication is hidden behind training."""
        return False


def outer_learning_rate(default: float = 0.7) -> Any:
    """The outer learning rate, a hyperparameter that comparisons share."""
    return Field(
        default,
        gt=0,
        description="outer learning rate (DiLoCo lineage: 0.7)",
        json_schema_extra=SHARED,
    )


def outer_momentum(default: float = 0.9) -> Any:
    """The outer Nesterov momentum, a hyperparameter that comparisons share."""
    return Field(
        default,
        ge=0,
        lt=1,
        description="outer Nesterov momentum (DiLoCo lineage: 0.9)",
        json_schema_extra=SHARED,
    )


def state_of(kind: type[S], state: MethodState) -> S:
    """`state` as the method's own type; a `ConfigError` where it is another method's."""
    if not isinstance(state, kind):
        raise ConfigError(f"state of {type(state).__qualname__} given, {kind.__qualname__} needed")
    return state
