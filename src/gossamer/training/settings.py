"""How a replica is trained: the recipe's `[train]` section."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from gossamer.errors import ConfigError
from gossamer.settings import Settings

# Settings that only one choice of another setting reads.
_READ_BY = {
    "beta1": ("optimizer", "adamw"),
    "beta2": ("optimizer", "adamw"),
    "epsilon": ("optimizer", "adamw"),
    "momentum": ("optimizer", "sgd"),
    "schedule_steps": ("schedule", "cosine"),
    "final_learning_rate": ("schedule", "cosine"),
}


class Training(Settings):
    """Inner training. Defaults follow the DiLoCo lineage, at the size of the shipped text task.

    `batch_size` and `sequence_length` shape a recipe's task. A task that a program makes has its
    own, and does not see them.
    """

    workers: int = Field(8, ge=1, description="number of workers")
    rounds: int = Field(60, ge=1, description="number of rounds")
    batch_size: int = Field(8, ge=1, description="sequences (or samples) in a worker's batch")
    sequence_length: int = Field(128, ge=2, description="tokens in a sequence")
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="inner optimizer")
    learning_rate: float = Field(4e-3, gt=0, description="peak inner learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW first-moment decay")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW second-moment decay")
    epsilon: float = Field(1e-8, gt=0, description="AdamW denominator floor")
    momentum: float = Field(0.0, ge=0, lt=1, description="heavy-ball momentum of SGD")
    weight_decay: float = Field(
        0.1, ge=0, description="on matrices only; decoupled with AdamW, not so with SGD"
    )
    clip_norm: float = Field(1.0, ge=0, description="gradient norm clipped to this; 0 for never")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="inner steps of linear warm-up")
    schedule_steps: int | None = Field(
        None, ge=1, description="inner steps until the cosine ends; default: rounds x inner steps"
    )
    final_learning_rate: float = Field(
        0.1, ge=0, le=1, description="end of the cosine, as a fraction of the peak"
    )

    @model_validator(mode="after")
    def _no_setting_is_ignored(self) -> Self:
        for name, (choice, reader) in _READ_BY.items():
            value, default = getattr(self, name), type(self).model_fields[name].default
            if value != default and getattr(self, choice) != reader:
                raise ValueError(
                    f"{name}: {value!r} would be ignored, as {choice} is "
                    f"{getattr(self, choice)!r}; only {reader!r} uses it: leave one of them out"
                )
        return self


def refuse_sequence_length(train: Training, task: str) -> None:
    """Raise `ConfigError` where a sequence length is set for a task that has no sequences."""
    default = Training.model_fields["sequence_length"].default
    if train.sequence_length != default:
        raise ConfigError(
            f"train.sequence_length: {train.sequence_length} would be ignored, as the task "
            f"{task!r} has no sequences; leave it out"
        )
