"""Tensors on disk in the safetensors format, written straight from their memory.

The library's own writer builds the whole file in memory first; a worker with a model that fills its
machine has no room for that.
"""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gossamer.cluster.wire import raw_bytes
from gossamer.errors import CheckpointError

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file and wait until the disk has it. Raises `OSError`; part of it may be there."""
    # Largest elements first, so that each tensor lies at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, dict[str, object]] = {}
    place = 0
    for name, tensor in ordered:
        end = place + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(raw_bytes(tensor.cpu()).numpy().data)
        file.flush()
        os.fsync(file.fileno())


class Aside:
    """Tensors put aside on disk, in a file without a name, which ends with this object.

    Args:
        folder: where; made where it is missing.
        tensors: written at once, one after the other.

    Raises `OSError` where the disk is full or may not be written to.
    """

    def __init__(self, folder: Path, tensors: Sequence[Tensor]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._handle, name = tempfile.mkstemp(prefix=".aside-", dir=folder)
        weakref.finalize(self, os.close, self._handle)
        Path(name).unlink()
        self._about = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        self._places: list[int] = []
        with open(self._handle, "wb", closefd=False) as file:
            for tensor in tensors:
                self._places.append(file.tell())
                file.write(raw_bytes(tensor.cpu()).numpy().data)

    def read(self, index: int) -> Tensor:
        """One of them, in memory of its own. Raises `OSError`."""
        shape, dtype = self._about[index]
        tensor = torch.empty(shape, dtype=dtype)
        memory, place = raw_bytes(tensor).numpy().data, self._places[index]
        while memory:
            count = os.preadv(self._handle, [memory], place)
            if count == 0:
                raise OSError("what was put aside on disk is not there any more")
            memory, place = memory[count:], place + count
        return tensor


def read_tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, one in memory at a time. Raises `CheckpointError`."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                yield name, file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
