"""The kinds of task that a recipe can have, by the name that its `[task]` gives."""

from __future__ import annotations

from gossamer.training.convex_settings import (
    HardConvexSettings,
    LeastSquaresSettings,
    LogisticRegressionSettings,
)
from gossamer.training.task_settings import TaskSettings, TextSettings

TASKS: dict[str, type[TaskSettings]] = {
    "text": TextSettings,
    "least_squares": LeastSquaresSettings,
    "logistic_regression": LogisticRegressionSettings,
    "hard_convex": HardConvexSettings,
}
