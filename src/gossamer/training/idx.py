"""IDX files, the format of MNIST and its many relatives.

0, 0, type, number of dimensions     one byte each; type 8 is unsigned bytes
sizes                                big-endian, four bytes each
values                               row by row
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import ConfigError

UNSIGNED_BYTES = 8
_TYPES = {9: "signed bytes", 11: "16-bit integers", 12: "32-bit integers",
          13: "32-bit floats", 14: "64-bit floats"}  # fmt: skip
_DIMENSIONS_MAX = 4
_VALUES_MAX = 2**34  # more than any data set of this kind: a damaged header


def read_idx(path: Path, num_dimensions: int) -> NDArray[np.uint8]:
    """The unsigned bytes of an IDX file, in its own shape; `.gz` is unpacked.

    Raises `ConfigError` for a file that is missing, damaged, cut short, of another type or of other
    than `num_dimensions` dimensions.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return _read(file, path, num_dimensions)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {str(path)!r}: {reason}") from None


def _read(file: BinaryIO | gzip.GzipFile, path: Path, num_dimensions: int) -> NDArray[np.uint8]:
    start = file.read(4)
    if len(start) < 4 or start[:2] != b"\0\0":
        raise ConfigError(
            f"{str(path)!r} is no IDX file: it begins with {start.hex(' ') or 'nothing'}, not with "
            f"two zero bytes, a type and a number of dimensions"
        )
    kind, given = start[2], start[3]
    if kind != UNSIGNED_BYTES:
        found = _TYPES.get(kind, f"values of unknown type {kind}")
        raise ConfigError(f"{str(path)!r} holds {found}; unsigned bytes (type 8) are needed")
    if given != num_dimensions or given > _DIMENSIONS_MAX:
        raise ConfigError(f"{str(path)!r} has {given} dimensions; {num_dimensions} are needed")
    sizes = file.read(4 * given)
    if len(sizes) < 4 * given:
        raise ConfigError(f"{str(path)!r} ends within its header")
    shape = tuple(int.from_bytes(sizes[4 * d : 4 * d + 4], "big") for d in range(given))
    expected = math.prod(shape)
    if expected == 0 or expected > _VALUES_MAX:
        raise ConfigError(f"{str(path)!r} says that its shape is {shape}, which cannot be")
    content = file.read(expected + 1)
    if len(content) != expected:
        found = "more" if len(content) > expected else f"only {len(content)}"
        raise ConfigError(f"{str(path)!r} says that it holds {expected} values, and has {found}")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
