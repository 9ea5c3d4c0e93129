"""The recipe's `[task]` section: one class for each kind of task, chosen by its `name`."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from gossamer.errors import ConfigError
from gossamer.settings import Settings
from gossamer.training.settings import Training
from gossamer.training.task import Task
from gossamer.training.text import TextTask

SHIPPED_TEXTS = ("shakespeare",)


class TaskSettings(Settings):
    """What every kind of task can do; a subclass adds `name` and the settings of its kind."""

    name: str = Field(description="kind of task")

    def located(self, base: Path) -> Self:
        """The same with data paths made absolute, looked for in `base`, then in the cwd.

        Raises `ConfigError` where there is no such file.
        """
        return self

    def files(self) -> dict[str, list[Path]]:
        """The user's own files by the setting that names them; shipped data is not among them."""
        return {}

    @property
    def architecture(self) -> str:
        """What is trained, for a run's files."""
        return self.name

    @abstractmethod
    def build(self, train: Training) -> Task:
        """The task itself. Raises `ConfigError` for what cannot be made."""


class TextSettings(TaskSettings):
    """`[task]` with name = "text": language modelling on bytes."""

    name: Literal["text"] = Field("text", description="kind of task")
    model: str = Field("llama-tiny", description="size of the decoder, such as llama-tiny")
    data: str = Field("shakespeare", description="a shipped text or the path of a text file")
    eval_sequences: int = Field(64, ge=1, description="held-out sequences that are evaluated")
    probe_sequences: int = Field(2, ge=1, description="those of them for the JS distance")

    def located(self, base: Path) -> Self:
        """The same with `data` as an absolute path, looked for in `base`, then in the cwd."""
        if self.data in SHIPPED_TEXTS:
            return self
        for folder in (base, Path.cwd()):
            if (folder / self.data).is_file():
                return self.model_copy(update={"data": str((folder / self.data).resolve())})
        raise ConfigError(
            f"task.data: no file {self.data!r} in {base} or {Path.cwd()}; give the path of a text "
            f"file, or a shipped text ({', '.join(SHIPPED_TEXTS)})"
        )

    def files(self) -> dict[str, list[Path]]:
        """The text, unless it is a shipped one."""
        return {} if self.data in SHIPPED_TEXTS else {"data": [Path(self.data)]}

    @property
    def architecture(self) -> str:
        """The decoder's name."""
        return self.model

    def build(self, train: Training) -> Task:
        """The task itself. Raises `ConfigError` for an unknown model or unusable data."""
        try:
            return TextTask(
                model=self.model,
                data=self.data,
                batch_size=train.batch_size,
                sequence_length=train.sequence_length,
                eval_sequences=self.eval_sequences,
                probe_sequences=self.probe_sequences,
            )
        except ConfigError as error:
            raise ConfigError(f"task: {error}") from None
