"""What every method is: hyperparameters, a state, and one async loop per worker.

A method file reads like its paper's algorithm box. It touches the world through `Context` only.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import Field, model_validator
from torch import Tensor

from gossamer.codec import PLAIN, check_codec, is_sparse
from gossamer.comm.context import Context, MethodState
from gossamer.errors import ConfigError
from gossamer.settings import Settings
from gossamer.training.layout import ParameterLayout
from gossamer.training.replica import Replica
from gossamer.training.settings import Training

S = TypeVar("S", bound=MethodState)

SHARED: dict[str, Any] = {"shared": True}
"""Marks a hyperparameter that comparisons carry over from one method to the next."""


@dataclass(frozen=True, slots=True)
class Sends:
    """What a method sends that a codec encodes.

    Args:
        points: parameters themselves are sent, of which no value may be left out.
        averages: all members adopt what was decoded, so that an error can be fed back.
    """

    points: bool = False
    averages: bool = False


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
    codec: str = Field(
        PLAIN,
        description='encoding of what is sent: "none", or such as "bf16", "int8", "topk:0.01"',
        json_schema_extra=SHARED,
    )
    error_feedback: bool | None = Field(
        None, description="what payloads lose is added to the next ones; left out: with topk"
    )

    @model_validator(mode="after")
    def _codec_fits(self) -> Method:
        check_codec(self.codec)
        if self.codec == PLAIN:
            if self.error_feedback:
                raise ValueError("error_feedback: needs a codec, as nothing is lost without one")
            return self
        if self.sends is None:
            raise ValueError(
                f"codec: {self.name} sends nothing that could be encoded, and {self.codec!r} would "
                f'be ignored; leave it out, or set "none"'
            )
        if self.sends.points and is_sparse(self.codec):
            raise ValueError(
                f"codec: {self.codec!r} leaves values out, and {self.name} sends parameters "
                f"themselves, of which the small ones would never be mixed; take a codec that "
                f'keeps all values, such as "int8"'
            )
        if self.error_feedback and not self.sends.averages:
            raise ValueError(
                f"error_feedback: with {self.name} what a payload loses stays with its worker, or "
                f"is the method's own business; leave it out"
            )
        return self

    @property
    def sends(self) -> Sends | None:
        """What of this method's payloads a codec encodes; None: nothing."""
        return None

    def new_residual(self, replica: Replica, parts: int = 1) -> Tensor | None:
        """What `MethodState.residual` begins with, [parts P]; None without error feedback."""
        wanted = self.error_feedback
        if self.sends is None or not self.sends.averages or self.codec == PLAIN:
            return None
        if not (is_sparse(self.codec) if wanted is None else wanted):
            return None
        return replica.parameters.new_zeros(parts * replica.parameters.numel())

    @abstractmethod
    def init(self, replica: Replica) -> MethodState:
        """The state before the first round; tensors of its own, never views of the replica."""

    @abstractmethod
    async def run(self, ctx: Context, state: MethodState) -> None:
        """One worker's loop over `ctx.rounds(state)`."""

    @property
    def num_syncers(self) -> int:
        """Places beside the workers that gather and hand out; most methods need none."""
        return 0

    def init_syncer(self, replica: Replica, num_workers: int) -> MethodState:
        """A syncer's state before the first round; `replica` has the workers' start values."""
        raise ConfigError(f"{type(self).__name__} has no syncer")

    async def run_syncer(self, ctx: Context, state: MethodState) -> None:
        """One syncer's loop, without end; `ctx.checkpoint(state)` makes what it did durable."""
        raise ConfigError(f"{type(self).__name__} has no syncer")

    def validate_for(self, layout: ParameterLayout, num_workers: int) -> None:
        """Raise `ConfigError` where these hyperparameters do not fit the model or the run."""

    def validate_training(self, training: Training) -> None:
        """Raise `ConfigError` where these hyperparameters do not fit the recipe's [train]."""

    def needs_numerics(self) -> str | None:
        """Why this method cannot run without numerics, or None where it can."""
        return None

    @property
    def makes_own_steps(self) -> bool:
        """Whether it makes its steps itself, from `Context.gradients`.

        Of the recipe's [train] it then uses the learning rate and its schedule. There is no inner
        optimizer, momentum, weight decay or clipping, and settings of them are refused.
        """
        return False

    @property
    def moments_are_shared(self) -> bool:
        """Whether all workers hold the same inner moments, so that a joiner must take a donor's."""
        return False

    @property
    def overlaps(self) -> bool:
        """Whether part of the communication is hidden behind training."""
        return False


# What [train] says of a method that makes its own steps: a plain step, of a plain gradient.
_OWN_STEPS: dict[str, Any] = {
    "optimizer": "sgd",
    "momentum": 0.0,
    "weight_decay": 0.0,
    "clip_norm": 0.0,
    "beta1": Training.model_fields["beta1"].default,
    "beta2": Training.model_fields["beta2"].default,
    "epsilon": Training.model_fields["epsilon"].default,
}


def training_of(method: Method, training: Training) -> Training:
    """The [train] that is in force with `method`.

    For a method that makes its own steps the defaults of the inner optimizer, weight decay and
    clipping give way to none at all. Raises `ConfigError` where one of them was set to more, or
    where the method's hyperparameters do not fit.
    """
    method.validate_training(training)
    if not method.makes_own_steps:
        return training
    for name, plain in _OWN_STEPS.items():
        value = getattr(training, name)
        if name in training.model_fields_set and value != plain:
            raise ConfigError(
                f"train.{name}: {value!r} would be ignored: {method.name} makes its steps itself, "
                f"with no inner optimizer, weight decay or clipping; leave it out, or set {plain!r}"
            )
    return Training(**{**training.model_dump(exclude_unset=True), **_OWN_STEPS})


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
