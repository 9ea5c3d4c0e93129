"""Labelled images from files: MNIST-style IDX and the binary version of CIFAR-10.

Nothing is unpickled. What is read is kept, so that the runs of a comparison share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import ConfigError
from gossamer.training.idx import read_idx

FASHION_MNIST_DIR = Path("/usr/share/datasets/fashion-mnist")  # Debian's dataset-fashion-mnist
SHIPPED_IMAGES = ("digits",)
NAMED_IMAGES = (*SHIPPED_IMAGES, "fashion-mnist")

CIFAR_SHAPE = (3, 32, 32)
CIFAR_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR_TEST = "test_batch.bin"
_CIFAR_RECORD = 1 + 3 * 32 * 32  # a label and an image
_CIFAR_CLASSES = 10

_IDX_PARTS = ("train-images", "train-labels", "t10k-images", "t10k-labels")


@dataclass(frozen=True)
class LabelledImages:
    """Images and their classes.

    Args:
        pixels: uint8 [n, channels, height, width].
        labels: int64 [n].
    """

    pixels: Tensor
    labels: Tensor


@dataclass(frozen=True)
class ImageFiles:
    """Where the parts of a data set are, in the order train, test."""

    kind: str  # "idx" or "cifar"
    paths: tuple[Path, ...]

    def load(self) -> tuple[LabelledImages, LabelledImages]:
        """(train, test). Raises `ConfigError` for what is damaged or does not fit together."""
        stamps = tuple((p, p.stat().st_mtime_ns, p.stat().st_size) for p in self.paths)
        return _load(self.kind, stamps)


def find_images(data: str) -> ImageFiles:
    """The files of "digits" (shipped), "fashion-mnist" (where installed) or of a folder.

    A folder holds the four files of MNIST, packed or not, or the six of CIFAR-10's binary version.
    Raises `ConfigError`.
    """
    if data == "digits":
        folder = Path(str(resources.files("gossamer"))) / "data" / "digits"
    elif data == "fashion-mnist":
        folder = FASHION_MNIST_DIR
        if not folder.is_dir():
            raise ConfigError(
                f"Fashion-MNIST is not installed ({folder} is missing): run `make data`, or as "
                f"root `apt-get install dataset-fashion-mnist`; or give the folder of its IDX files"
            )
    else:
        folder = Path(data)
    _refuse_unreadable(folder, data)
    for place in (folder, folder / "cifar-10-batches-bin"):
        if (place / CIFAR_TEST).is_file():
            return ImageFiles("cifar", _cifar_paths(place))
    found = [_idx_path(folder, part) for part in _IDX_PARTS]
    paths = [path for path in found if path is not None]
    if len(paths) == len(_IDX_PARTS):
        return ImageFiles("idx", tuple(paths))
    if paths:
        missing = _IDX_PARTS[found.index(None)]
        raise ConfigError(f"{str(folder)!r} has {paths[0].name} but no {missing}-idx*-ubyte[.gz]")
    raise ConfigError(
        f"{str(folder)!r} holds no images that are understood: train-images-idx3-ubyte[.gz] and "
        f"the other three of MNIST, or {CIFAR_TRAIN[0]} and the other five of CIFAR-10 (binary)"
    )


def _refuse_unreadable(folder: Path, data: str) -> None:
    """Refuse what is no folder, and the version of CIFAR-10 that would have to be unpickled."""
    if folder.is_file():
        raise ConfigError(f"data {data!r} is a file; give the folder that holds the unpacked files")
    if not folder.is_dir():
        raise ConfigError(
            f"data {data!r}: no such folder; give {', '.join(map(repr, NAMED_IMAGES))} or the path "
            f"of a folder of images"
        )
    pickled = (folder / "data_batch_1", folder / "cifar-10-batches-py")
    if any(path.exists() for path in pickled) and not (folder / CIFAR_TEST).exists():
        raise ConfigError(
            f"{str(folder)!r} holds CIFAR-10's Python version, which is pickled: reading it would "
            f"run whatever the files contain. Use the binary version (cifar-10-binary.tar.gz, "
            f"unpacked), which has the same images"
        )


def _idx_path(folder: Path, part: str) -> Path | None:
    rank = "idx3" if part.endswith("images") else "idx1"
    for name in (f"{part}-{rank}-ubyte", f"{part}.{rank}-ubyte"):
        for suffix in ("", ".gz"):
            if (folder / (name + suffix)).is_file():
                return folder / (name + suffix)
    return None


def _cifar_paths(folder: Path) -> tuple[Path, ...]:
    for name in CIFAR_TRAIN:
        if not (folder / name).is_file():
            raise ConfigError(f"{str(folder)!r} has {CIFAR_TEST} but no {name}")
    return tuple(folder / name for name in (*CIFAR_TRAIN, CIFAR_TEST))


@lru_cache(maxsize=2)  # the runs of one comparison share them
def _load(
    kind: str, stamps: tuple[tuple[Path, int, int], ...]
) -> tuple[LabelledImages, LabelledImages]:
    """Times and sizes of the files are there to notice a change."""
    paths = [path for path, _, _ in stamps]
    if kind == "cifar":
        parts = [_read_cifar(path) for path in paths]
        train = LabelledImages(
            torch.cat([part.pixels for part in parts[:-1]]),
            torch.cat([part.labels for part in parts[:-1]]),
        )
        return train, parts[-1]
    train, test = _read_pair(paths[0], paths[1]), _read_pair(paths[2], paths[3])
    if train.pixels.shape[1:] != test.pixels.shape[1:]:
        shapes = [list(part.pixels.shape[2:]) for part in (train, test)]
        raise ConfigError(
            f"{paths[0].name} has images of {shapes[0]} and {paths[2].name} of {shapes[1]}"
        )
    return train, test


def _read_pair(images: Path, labels: Path) -> LabelledImages:
    pixels, classes = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(classes):
        raise ConfigError(
            f"{str(images)!r} has {len(pixels)} images and {labels.name} {len(classes)} labels"
        )
    return LabelledImages(
        torch.from_numpy(pixels.copy())[:, None], torch.from_numpy(classes.astype(np.int64))
    )


def _read_cifar(path: Path) -> LabelledImages:
    """Records of a label and an image, channel by channel."""
    content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if len(content) == 0 or len(content) % _CIFAR_RECORD:
        raise ConfigError(
            f"{str(path)!r} has {len(content)} bytes, not a multiple of the {_CIFAR_RECORD} of a "
            f"label and an image of 3 x 32 x 32"
        )
    records = content.reshape(-1, _CIFAR_RECORD)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= _CIFAR_CLASSES:
        raise ConfigError(
            f"{str(path)!r} has a label {labels.max()}; CIFAR-10 has 0 to 9 (CIFAR-100's files "
            f"have two labels an image and are not understood)"
        )
    pixels = torch.from_numpy(records[:, 1:].reshape(-1, *CIFAR_SHAPE).copy())
    return LabelledImages(pixels, torch.from_numpy(labels))
