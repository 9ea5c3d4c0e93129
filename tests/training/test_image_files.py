"""Image files: what is written by hand is read back, and what is damaged is named."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gossamer.errors import ConfigError
from gossamer.training import image_files
from gossamer.training.idx import read_idx
from gossamer.training.image_files import CIFAR_TRAIN, find_images

Bytes = NDArray[np.uint8]


def idx(values: Bytes) -> bytes:
    """An IDX file as the format's description has it."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes()


def noise(*shape: int, top: int = 256, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, top, shape, dtype=np.uint8)


def mnist_like(folder: Path, *, train: int = 6, test: int = 4, packed: bool = False) -> None:
    for part, count, seed in (("train", train, 1), ("t10k", test, 2)):
        for name, values in (
            (f"{part}-images-idx3-ubyte", noise(count, 5, 7, seed=seed)),
            (f"{part}-labels-idx1-ubyte", noise(count, top=10, seed=seed)),
        ):
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(values)))
            else:
                (folder / name).write_bytes(idx(values))


def cifar_like(folder: Path, records: int = 3) -> None:
    for seed, name in enumerate([*CIFAR_TRAIN, "test_batch.bin"]):
        content = noise(records, 3073, seed=seed)
        content[:, 0] %= 10
        (folder / name).write_bytes(content.tobytes())


# ---------------------------------------------------------------------------------------------- IDX


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.booleans())
@settings(max_examples=40, deadline=None)
def test_an_idx_file_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], packed: bool
) -> None:
    values = noise(*shape)
    path = tmp_path_factory.mktemp("idx") / ("f.gz" if packed else "f")
    path.write_bytes(gzip.compress(idx(values)) if packed else idx(values))
    got = read_idx(path, len(shape))
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, values)


GOOD = idx(noise(2, 3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no IDX file: it begins with nothing"),
        (b"\0\0\x08", "is no IDX file: it begins with 00 00 08"),
        (b"PK\x03\x04rest", "is no IDX file: it begins with 50 4b 03 04"),
        (b"\0\0\x0d\x02" + GOOD[4:], r"holds 32-bit floats; unsigned bytes \(type 8\) are needed"),
        (b"\0\0\x07\x02" + GOOD[4:], "holds values of unknown type 7"),
        (b"\0\0\x08\x03" + GOOD[4:], "has 3 dimensions; 2 are needed"),
        (GOOD[:9], "ends within its header"),
        (GOOD[:-1], "says that it holds 6 values, and has only 5"),
        (GOOD + b"\0", "says that it holds 6 values, and has more"),
        (b"\0\0\x08\x02" + b"\xff" * 8, "which cannot be"),
        (b"\0\0\x08\x02" + bytes(8), r"says that its shape is \(0, 0\), which cannot be"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_idx_file_is_named(
    tmp_path: Path, content: bytes, message: str, packed: bool
) -> None:
    path = tmp_path / ("values.gz" if packed else "values")
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_idx(path, 2)
    assert str(path) in str(caught.value)


def test_damaged_packing_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(idx(noise(40, 50)))
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    broken = {"cut": whole[:-20], "none": b"not packed", "flipped": bytes(flipped)}
    broken["noise"] = whole[:10] + b"\xff" * 50
    for name, content in broken.items():
        path = tmp_path / f"{name}.gz"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="cannot read"):
            read_idx(path, 2)
    with pytest.raises(ConfigError, match=r"cannot read .*missing.*No such file"):
        read_idx(tmp_path / "missing.gz", 2)


@given(content=st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_content_does_anything_but_be_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz"
    path.write_bytes(b"\0\0\x08" + content)
    try:
        values = read_idx(path, 1)
    except ConfigError:
        return
    assert idx(values) == path.read_bytes()


# ------------------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_like_mnists_is_read(tmp_path: Path, packed: bool) -> None:
    mnist_like(tmp_path, packed=packed)
    train, test = find_images(str(tmp_path)).load()
    np.testing.assert_array_equal(train.pixels.numpy(), noise(6, 5, 7, seed=1)[:, None])
    np.testing.assert_array_equal(test.labels.numpy(), noise(4, top=10, seed=2))
    assert train.labels.dtype.is_signed


def test_files_whose_names_have_dots_are_found(tmp_path: Path) -> None:
    mnist_like(tmp_path)
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / path.name.replace("-idx", ".idx"))
    assert len(find_images(str(tmp_path)).load()[0].labels) == 6


@pytest.mark.parametrize("below", [".", "cifar-10-batches-bin"])
def test_the_binary_version_of_cifar_is_read(tmp_path: Path, below: str) -> None:
    (tmp_path / below).mkdir(exist_ok=True)
    cifar_like(tmp_path / below)
    train, test = find_images(str(tmp_path)).load()
    assert list(train.pixels.shape) == [15, 3, 32, 32]
    record = noise(3, 3073, seed=1)[2]  # the third of data_batch_2: a label, then red, green, blue
    assert train.labels[5] == record[0] % 10
    assert train.pixels[5, 0, 0, 1] == record[2]
    assert train.pixels[5, 1, 0, 0] == record[1 + 1024]
    assert train.pixels[5, 2, 31, 31] == record[-1]
    assert list(test.labels) == [label % 10 for label in noise(3, 3073, seed=5)[:, 0]]


class Bomb:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.mkdir, (self.trace,)  # type: ignore[return-value]


@pytest.mark.parametrize("below", [".", "cifar-10-batches-py"])
def test_the_pickled_version_of_cifar_is_refused_unread(tmp_path: Path, below: str) -> None:
    (tmp_path / below).mkdir(exist_ok=True)
    trace = tmp_path / "trace"
    for number in range(1, 6):
        (tmp_path / below / f"data_batch_{number}").write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(ConfigError, match=r"is pickled.*Use the binary version \(cifar-10-binary"):
        find_images(str(tmp_path))
    assert not trace.exists()


def test_damaged_or_missing_files_of_cifar_are_named(tmp_path: Path) -> None:
    cifar_like(tmp_path)
    victim = tmp_path / "data_batch_3.bin"
    whole = victim.read_bytes()
    for content, message in (
        (whole[:-1], "data_batch_3.bin' has 9218 bytes, not a multiple of the 3073"),
        (b"", "has 0 bytes"),
        (b"\x0a" + whole[1:], "has a label 10; CIFAR-10 has 0 to 9"),
    ):
        victim.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            find_images(str(tmp_path)).load()
    victim.unlink()
    with pytest.raises(ConfigError, match=r"has test_batch.bin but no data_batch_3.bin"):
        find_images(str(tmp_path))


def test_parts_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    mnist_like(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(noise(5, top=10)))
    with pytest.raises(ConfigError, match="has 6 images and train-labels-idx1-ubyte 5 labels"):
        find_images(str(tmp_path)).load()
    labels.write_bytes(idx(noise(6, top=10)))
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(noise(4, 7, 5)))
    with pytest.raises(ConfigError, match=r"has images of \[5, 7\] and .* of \[7, 5\]"):
        find_images(str(tmp_path)).load()
    labels.unlink()
    with pytest.raises(ConfigError, match="but no train-labels-idx"):
        find_images(str(tmp_path))


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    mnist_like(tmp_path)
    before = find_images(str(tmp_path)).load()[0]
    assert find_images(str(tmp_path)).load()[0] is before
    mnist_like(tmp_path, train=7)
    assert len(find_images(str(tmp_path)).load()[0].labels) == 7


def test_other_places_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "archive.tar.gz").write_bytes(b"x")
    for data, message in (
        (tmp_path / "archive.tar.gz", "is a file; give the folder that holds the unpacked files"),
        (tmp_path / "nothing", "no such folder; give 'digits', 'fashion-mnist' or the path"),
        (tmp_path, "holds no images that are understood"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_images(str(data))
    monkeypatch.setattr(image_files, "FASHION_MNIST_DIR", tmp_path / "absent")
    with pytest.raises(ConfigError, match="run `make data`, or as root `apt-get install dataset"):
        find_images("fashion-mnist")


# -------------------------------------------------------------------------------------- shipped


def test_the_shipped_digits_are_whole() -> None:
    train, test = find_images("digits").load()
    assert list(train.pixels.shape) == [1433, 1, 8, 8]
    assert list(test.pixels.shape) == [364, 1, 8, 8]
    for part in (train, test):
        assert int(part.pixels.max()) == 16
        counts = part.labels.bincount()
        assert len(counts) == 10 and counts.min() > 0.9 * counts.max()
    # Digits are told apart by their means, or pictures and labels would not belong together.
    flat = train.pixels.flatten(1).double()
    means = [flat[train.labels == digit].mean(0) for digit in range(10)]
    away = [((test.pixels.flatten(1).double() - mean) ** 2).sum(1).tolist() for mean in means]
    right = np.argmin(np.array(away), axis=0) == test.labels.numpy()
    assert right.mean() > 0.85


@pytest.mark.skipif(not image_files.FASHION_MNIST_DIR.is_dir(), reason="run `make data` for it")
def test_fashion_mnist_is_read_where_it_is_installed() -> None:
    train, test = find_images("fashion-mnist").load()
    assert list(train.pixels.shape) == [60000, 1, 28, 28]
    assert train.labels.bincount().tolist() == [6000] * 10
    assert test.labels.bincount().tolist() == [1000] * 10
