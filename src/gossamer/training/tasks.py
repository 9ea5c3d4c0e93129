"""The kinds of task that a recipe can have, by the name that its `[task]` gives."""

from __future__ import annotations

from gossamer.training.convex_settings import (
    HardConvexSettings,
    LeastSquaresSettings,
    LogisticRegressionSettings,
)
from gossamer.training.image_settings import ImageSettings
from gossamer.training.task_settings import TaskSettings, TextSettings

TASKS: dict[str, type[TaskSettings]] = {
    "text": TextSettings,
    "images": ImageSettings,
    "least_squares": LeastSquaresSettings,
    "logistic_regression": LogisticRegressionSettings,
    "hard_convex": HardConvexSettings,
}
