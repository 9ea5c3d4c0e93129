"""Image classification: labelled images, divided over the workers, read in seeded epochs.

From Python, any data set of torch's kind will do:

    task = ImageTask(train=my_train_set, test=my_test_set, model="resnet18", batch_size=16)

and by name or folder what `find_images` understands:

    task = ImageTask.from_files("fashion-mnist", batch_size=4, split="dirichlet")
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from gossamer.errors import ConfigError
from gossamer.training.image_files import LabelledImages, find_images
from gossamer.training.image_models import ConvNet, Norm, ResNet, build_model
from gossamer.training.partition import Indices, permutation, split_dirichlet, split_iid

Split = Literal["iid", "dirichlet"]

EVAL_BATCH_MAX = 500  # images in one evaluation batch
PROBE_SAMPLES = 64


class ImageBatch(NamedTuple):
    """Images and classes.

    Args:
        images: fp32 [B, channels, height, width].
        labels: int64 [B].
        weight: of the batch among others of the held-out set; 1 in training.
    """

    images: Tensor
    labels: Tensor
    weight: float = 1.0


class ImageSource(Protocol):
    """Where images come from, by index."""

    labels: Tensor  # int64 [n]
    shape: tuple[int, int, int]  # channels, height, width

    def take(self, indices: Tensor) -> Tensor:
        """Images fp32 [len(indices), channels, height, width]."""


class PixelSource:
    """Images held as bytes; what is taken has mean 0 and deviation 1 per channel of `reference`.

    Args:
        images: the bytes and the labels.
        reference: pixels uint8 [n, C, H, W] that fix the scale: those of the training images.
    """

    def __init__(self, images: LabelledImages, reference: Tensor) -> None:
        self.labels, self._pixels = images.labels, images.pixels
        channels, height, width = images.pixels.shape[1:]
        self.shape = (channels, height, width)
        counts = torch.stack([torch.bincount(c.flatten(), minlength=256)
                              for c in reference.transpose(0, 1)]).double()  # fmt: skip
        shares = counts / counts.sum(1, keepdim=True)  # exact: no sum over pixels is rounded
        values = torch.arange(256, dtype=torch.float64)
        means = shares @ values
        deviations = ((values - means[:, None]) ** 2 * shares).sum(1).sqrt()
        deviations[deviations == 0] = 1.0  # a channel of one colour
        self._mean = means.float()[:, None, None]
        self._deviation = deviations.float()[:, None, None]

    def take(self, indices: Tensor) -> Tensor:
        """Images fp32 [len(indices), channels, height, width]."""
        return self._pixels[indices].float().sub_(self._mean).div_(self._deviation)


class DatasetSource:
    """A map-style `torch.utils.data.Dataset` of (image, class) pairs; items are read when needed.

    An image is a tensor [C, H, W] or [H, W], or an array or picture [H, W] or [H, W, C]. Bytes are
    scaled to [0, 1], other values are left as they are. Items that differ from one reading to the
    next (random augmentation) make runs that cannot be repeated.

    Raises `ConfigError` where the data set has no length or its items are something else.
    """

    def __init__(self, dataset: Dataset[Any], name: str) -> None:
        if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
            raise ConfigError(f"{name}: a data set with a length and items by index is needed")
        if len(dataset) == 0:
            raise ConfigError(f"{name}: the data set is empty")
        self._dataset, self._name = dataset, name
        channels, height, width = self._image(0).shape
        self.shape = (channels, height, width)
        self.labels = self._read_labels(len(dataset))

    def take(self, indices: Tensor) -> Tensor:
        """Images fp32 [len(indices), channels, height, width]."""
        images = [self._image(index) for index in indices.tolist()]
        for index, image in zip(indices.tolist(), images, strict=True):
            if tuple(image.shape) != self.shape:
                raise ConfigError(
                    f"{self._name}: image {index} is {list(image.shape)} and the first "
                    f"{list(self.shape)}; all must be of one size"
                )
        return torch.stack(images)

    def _item(self, index: int) -> tuple[Any, Any]:
        item = self._dataset[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ConfigError(
                f"{self._name}: item {index} is {type(item).__name__}, not (image, class)"
            )
        return item[0], item[1]

    def _image(self, index: int) -> Tensor:
        image = self._item(index)[0]
        if not isinstance(image, Tensor):
            array = np.asarray(image)
            if array.dtype.kind not in "uif":
                raise ConfigError(
                    f"{self._name}: image {index} is {type(image).__name__}, and no array"
                )
            image = torch.from_numpy(array.copy())
            if image.ndim == 3:
                image = image.permute(2, 0, 1)
        if image.ndim == 2:
            image = image[None]
        if image.ndim != 3:
            raise ConfigError(
                f"{self._name}: image {index} has {image.ndim} dimensions, 2 or 3 are needed"
            )
        return image.float() / 255 if image.dtype is torch.uint8 else image.float()

    def _read_labels(self, count: int) -> Tensor:
        """From the attribute `targets`, which spares reading every image, else from the items."""
        known = getattr(self._dataset, "targets", None)
        if not isinstance(known, Tensor | list | tuple | np.ndarray) or len(known) != count:
            known = [self._item(index)[1] for index in range(count)]
        labels = torch.as_tensor(np.asarray(known))
        if labels.ndim != 1 or labels.is_floating_point() or labels.min() < 0:
            raise ConfigError(f"{self._name}: classes must be whole numbers from 0")
        return labels.to(torch.int64)


class ImageTask:
    """Classify images.

    Args:
        train, test: `torch.utils.data.Dataset`s of (image, class), or sources of one's own.
        model: "cnn" (two convolutions), "resnet8" or "resnet18", see `image_models`.
        norm: of the residual networks, "batch" or "group"; the module `image_models` says what
            workers do with the statistics of the first.
        batch_size: images in a worker's batch.
        split: "iid" gives the workers equal random shares; "dirichlet" divides every class by
            shares of its own, so that workers see different mixtures of classes.
        concentration: of the Dirichlet split; smaller is more uneven.
        probe_samples: held-out images on which workers' predictions are compared; None: 64, or
            all where there are fewer.

    Every training image belongs to exactly one worker. A worker reads its images in epochs, each in
    a random order of its own and without replacement; a batch may run over the end of one.

    Raises `ConfigError` for all mistakes in the arguments.
    """

    unit = "samples"

    def __init__(
        self,
        *,
        train: Dataset[Any] | ImageSource,
        test: Dataset[Any] | ImageSource,
        model: str = "cnn",
        norm: Norm = "batch",
        batch_size: int = 8,
        split: Split = "iid",
        concentration: float = 0.5,
        probe_samples: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        if split not in ("iid", "dirichlet"):
            raise ConfigError(f'split must be "iid" or "dirichlet", got {split!r}')
        if model != "cnn" and norm == "batch" and batch_size < 2:
            raise ConfigError('norm = "batch" needs batch_size 2 or more, or use norm = "group"')
        self.train, self.test = _source(train, "train"), _source(test, "test")
        if self.train.shape != self.test.shape:
            raise ConfigError(
                f"training images are {list(self.train.shape)}, held-out ones "
                f"{list(self.test.shape)}"
            )
        held_out = len(self.test.labels)
        if probe_samples is None:
            probe_samples = min(PROBE_SAMPLES, held_out)
        if not 1 <= probe_samples <= held_out:
            raise ConfigError(
                f"probe_samples must be from 1 to {held_out}, the held-out images; "
                f"got {probe_samples}"
            )
        self.model, self.norm, self.batch_size = model, norm, batch_size
        self.split, self.concentration = split, concentration
        self.probe_samples = probe_samples
        self.num_classes = int(max(self.train.labels.max(), self.test.labels.max())) + 1
        if self.num_classes < 2:
            raise ConfigError("the images are all of one class; there is nothing to learn")
        with torch.device("meta"):
            self.build()  # an unknown model is refused here
        self.shards: list[Indices] = []
        self._seed = 0
        self._orders: dict[int, tuple[int, Indices]] = {}

    @classmethod
    def from_files(
        cls,
        data: str = "digits",
        *,
        model: str = "cnn",
        norm: Norm = "batch",
        batch_size: int = 8,
        split: Split = "iid",
        concentration: float = 0.5,
        probe_samples: int | None = None,
    ) -> ImageTask:
        """On "digits", "fashion-mnist" or a folder; pixels are standardised per channel."""
        train, test = find_images(data).load()
        return cls(
            train=PixelSource(train, train.pixels),
            test=PixelSource(test, train.pixels),
            model=model,
            norm=norm,
            batch_size=batch_size,
            split=split,
            concentration=concentration,
            probe_samples=probe_samples,
        )

    @property
    def units_per_batch(self) -> int:
        """Images in one training batch."""
        return self.batch_size

    def build(self) -> ConvNet | ResNet:
        """A new model on the current default device."""
        return build_model(self.model, self.train.shape, self.num_classes, self.norm)

    def prepare(self, *, num_workers: int, seed: int, num_steps: int) -> None:
        """Divide the training images over the workers. `num_steps` may exceed an epoch.

        Raises `ConfigError` where a worker would have fewer images than a batch holds.
        """
        labels = self.train.labels.numpy()
        if len(labels) < num_workers * self.batch_size:
            raise ConfigError(
                f"{len(labels)} training images are too few for {num_workers} workers with batches "
                f"of {self.batch_size}"
            )
        self._seed, self._orders = seed, {}
        if self.split == "iid":
            self.shards = split_iid(len(labels), num_workers, seed)
        else:
            self.shards = split_dirichlet(
                labels, num_workers, self.concentration, seed, samples_min=self.batch_size
            )

    def train_batch(self, worker: int, step: int) -> ImageBatch:
        """The batch of a worker's step; depends on seed, worker and step only."""
        chosen = torch.from_numpy(self.batch_indices(worker, step))
        return ImageBatch(self.train.take(chosen), self.train.labels[chosen])

    def batch_indices(self, worker: int, step: int) -> Indices:
        """Which training images are in the batch of a worker's step, [B]."""
        if not self.shards:
            raise ConfigError("call prepare() with the number of workers before train_batch()")
        size = len(self.shards[worker])
        epoch, position = divmod(step * self.batch_size, size)
        chosen = self._order(worker, epoch)[position : position + self.batch_size]
        if len(chosen) < self.batch_size:  # the batch runs over the end of the epoch
            rest = self._order(worker, epoch + 1)[: self.batch_size - len(chosen)]
            chosen = np.concatenate((chosen, rest))
        return chosen

    def _order(self, worker: int, epoch: int) -> Indices:
        """The worker's images in the order of an epoch; the latest is kept."""
        kept = self._orders.get(worker)
        if kept is None or kept[0] != epoch:
            shard = self.shards[worker]
            order = shard[permutation(len(shard), self._seed, worker, "images", epoch)]
            kept = self._orders[worker] = (epoch, order)
        return kept[1]

    def eval_batches(self) -> Iterator[ImageBatch]:
        """All held-out images; weights make up for a last batch that is smaller."""
        count = len(self.test.labels)
        num_batches = -(-count // EVAL_BATCH_MAX)
        for index in range(num_batches):
            first, stop = count * index // num_batches, count * (index + 1) // num_batches
            yield self._held_out(torch.arange(first, stop), (stop - first) * num_batches / count)

    def probe_batch(self) -> ImageBatch:
        """`probe_samples` held-out images, evenly spread."""
        count, wanted = len(self.test.labels), self.probe_samples
        return self._held_out(torch.tensor([i * count // wanted for i in range(wanted)]), 1.0)

    def _held_out(self, indices: Tensor, weight: float) -> ImageBatch:
        return ImageBatch(self.test.take(indices), self.test.labels[indices], weight)

    def loss(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """Mean cross-entropy in nats, times the batch's weight."""
        loss = F.cross_entropy(model(batch.images), batch.labels)
        return loss if batch.weight == 1.0 else loss * batch.weight

    def metrics(self, model: nn.Module, batch: ImageBatch) -> dict[str, float]:
        """The share of images whose class has the largest logit, times the batch's weight."""
        right = model(batch.images).argmax(1) == batch.labels
        return {"accuracy": float(right.double().mean()) * batch.weight}

    def predict(self, model: nn.Module, batch: ImageBatch) -> Tensor:
        """Logits fp32 [B, classes]."""
        logits: Tensor = model(batch.images)
        return logits.float()


def _source(given: Dataset[Any] | ImageSource, name: str) -> ImageSource:
    return DatasetSource(given, name) if isinstance(given, Dataset) else given
