"""`[task]` with name = "images"."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from gossamer.errors import ConfigError
from gossamer.training.image_files import NAMED_IMAGES, SHIPPED_IMAGES, find_images
from gossamer.training.images import ImageTask
from gossamer.training.settings import Training, refuse_sequence_length
from gossamer.training.task import Task
from gossamer.training.task_settings import TaskSettings


class ImageSettings(TaskSettings):
    """`[task]` with name = "images": image classification."""

    name: Literal["images"] = Field("images", description="kind of task")
    model: str = Field("cnn", description="network: cnn, resnet8 or resnet18")
    norm: Literal["batch", "group"] = Field(
        "batch", description="normalisation of the residual networks"
    )
    data: str = Field(
        "digits",
        description="digits (shipped), fashion-mnist (Debian's package), or a folder of IDX files "
        "or of CIFAR-10's binary version",
    )
    split: Literal["iid", "dirichlet"] = Field(
        "iid", description="how the images are divided over the workers"
    )
    concentration: float = Field(
        0.5, gt=0, description="of the Dirichlet split; smaller is more uneven"
    )
    probe_samples: int | None = Field(
        None, ge=1, description="held-out images for the JS distance; default: 64"
    )

    @model_validator(mode="after")
    def _no_setting_is_ignored(self) -> Self:
        fields = type(self).model_fields
        if self.concentration != fields["concentration"].default and self.split != "dirichlet":
            raise ValueError(
                f"concentration: {self.concentration:g} would be ignored, as split is "
                f'{self.split!r}; set split = "dirichlet", or leave it out'
            )
        if self.norm != fields["norm"].default and self.model == "cnn":
            raise ValueError(
                f"norm: {self.norm!r} would be ignored, as the model cnn normalises nothing; "
                f"leave it out"
            )
        return self

    def located(self, base: Path) -> Self:
        """The same with a folder as an absolute path, looked for in `base`, then in the cwd."""
        if self.data in NAMED_IMAGES:
            return self
        for folder in (base, Path.cwd()):
            if (folder / self.data).exists():
                return self.model_copy(update={"data": str((folder / self.data).resolve())})
        raise ConfigError(
            f"task.data: no folder {self.data!r} in {base} or {Path.cwd()}; give the folder of the "
            f"images, or {' or '.join(NAMED_IMAGES)}"
        )

    def files(self) -> dict[str, list[Path]]:
        """The files of the images, unless they are shipped ones."""
        if self.data in SHIPPED_IMAGES:
            return {}
        return {"data": list(find_images(self.data).paths)}

    @property
    def architecture(self) -> str:
        """The network's name."""
        return self.model

    def build(self, train: Training) -> Task:
        """The task itself. Raises `ConfigError` for an unknown model or unusable data."""
        refuse_sequence_length(train, self.name)
        try:
            return ImageTask.from_files(
                self.data,
                model=self.model,
                norm=self.norm,
                batch_size=train.batch_size,
                split=self.split,
                concentration=self.concentration,
                probe_samples=self.probe_samples,
            )
        except ConfigError as error:
            raise ConfigError(f"task: {error}") from None
