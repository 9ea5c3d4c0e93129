"""`[task]` for the convex problems: least squares, logistic regression and the hard one."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from gossamer.errors import ConfigError
from gossamer.training.convex import HardConvex
from gossamer.training.finite_sums import LeastSquares, LogisticRegression
from gossamer.training.settings import Training, refuse_sequence_length
from gossamer.training.task import Task
from gossamer.training.task_settings import TaskSettings

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


class ConvexSettings(TaskSettings):
    """What the convex tasks have in common."""

    dimension: int = Field(32, ge=1, le=1_000_000, description="N, number of parameters")
    precision: Literal["fp32", "fp64"] = Field("fp32", description="of parameters and gradients")
    problem_seed: int = Field(
        0, ge=0, lt=2**63, description="of the problem; the recipe's own seed is that of the noise"
    )

    def build(self, train: Training) -> Task:
        """The task itself. Raises `ConfigError` for settings that make no problem."""
        refuse_sequence_length(train, self.name)
        try:
            return self.make(train.batch_size)
        except ConfigError as error:
            raise ConfigError(f"task: {error}") from None

    def make(self, batch_size: int) -> Task:
        """The problem with so many samples in a batch."""
        raise NotImplementedError


class LeastSquaresSettings(ConvexSettings):
    """`[task]` with name = "least_squares"."""

    name: Literal["least_squares"] = Field("least_squares", description="kind of task")
    samples: int = Field(1024, ge=1, le=10_000_000, description="n, drawn with replacement")
    label_noise: float = Field(0.5, ge=0, description="standard deviation of the targets")
    power: float = Field(1.0, ge=0, description="features have variance j^-power")
    ridge: float = Field(0.0, ge=0, description="weight of 1/2 |w|^2")

    def make(self, batch_size: int) -> LeastSquares:
        return LeastSquares(
            self.dimension,
            self.samples,
            label_noise=self.label_noise,
            power=self.power,
            ridge=self.ridge,
            batch_size=batch_size,
            seed=self.problem_seed,
            dtype=_DTYPES[self.precision],
        )


class LogisticRegressionSettings(ConvexSettings):
    """`[task]` with name = "logistic_regression"."""

    name: Literal["logistic_regression"] = Field("logistic_regression", description="kind of task")
    samples: int = Field(1024, ge=1, le=10_000_000, description="n, drawn with replacement")
    scale: float = Field(2.0, ge=0, description="standard deviation of the planted model's outputs")
    power: float = Field(1.0, ge=0, description="features have variance j^-power")
    ridge: float = Field(1e-3, gt=0, description="weight of 1/2 |w|^2")

    def make(self, batch_size: int) -> LogisticRegression:
        return LogisticRegression(
            self.dimension,
            self.samples,
            scale=self.scale,
            power=self.power,
            ridge=self.ridge,
            batch_size=batch_size,
            seed=self.problem_seed,
            dtype=_DTYPES[self.precision],
        )


class HardConvexSettings(ConvexSettings):
    """`[task]` with name = "hard_convex"."""

    name: Literal["hard_convex"] = Field("hard_convex", description="kind of task")
    dimension: int = Field(64, ge=1, le=1_000_000, description="N, number of parameters")
    power: float = Field(1.0, ge=0, description="curvatures are i^-power")
    asymmetry: float = Field(
        0.2, gt=0, le=1, description="curvature below the optimum as a share of that above"
    )
    noise: float = Field(1.0, ge=0, description="norm of the additive gradient noise")
    noise_power: float = Field(
        0.0, ge=0, description="its coordinate i falls like i^-noise_power; power / 2: as curvature"
    )
    multiplicative: float = Field(0.5, ge=0, le=1, description="relative noise of each curvature")
    decay: float = Field(0.5, ge=0, description="the optimum's coordinates fall like i^-decay")
    radius: float = Field(1.0, ge=0, description="distance from the start to the optimum")

    def make(self, batch_size: int) -> HardConvex:
        return HardConvex(
            self.dimension,
            power=self.power,
            asymmetry=self.asymmetry,
            noise=self.noise,
            noise_power=self.noise_power,
            multiplicative=self.multiplicative,
            decay=self.decay,
            radius=self.radius,
            batch_size=batch_size,
            seed=self.problem_seed,
            dtype=_DTYPES[self.precision],
        )
