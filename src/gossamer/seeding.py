"""Random streams named by what they are for, never by the order in which they are drawn.

    stream(seed, "mix1", round_index)       numpy, Philox
    torch_stream(seed, "data", worker)      torch

Equal parts give equal streams on every machine and in every process; differing parts, or equal
ones in another order, give independent streams. No global generator is read or written.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that is a pure function of `parts`.

    Integers may have any sign and size. `1` and `"1"` differ, and so do `("ab", "c")` and
    `("a", "bc")`: each part is encoded with its type and length. Raises `TypeError` for parts of
    another type (bools and floats included, as nobody can say which integer they would equal).
    """
    return int.from_bytes(_digest(parts)[:8], "little") >> 1


def stream(*parts: int | str) -> np.random.Generator:
    """A fresh numpy generator (Philox, 128-bit key) for `parts`."""
    key = int.from_bytes(_digest(parts), "little")
    return np.random.Generator(np.random.Philox(key=key))


def torch_stream(*parts: int | str) -> torch.Generator:
    """A fresh torch CPU generator for `parts`."""
    generator = torch.Generator()
    generator.manual_seed(derive_seed(*parts))
    return generator


def _digest(parts: tuple[int | str, ...]) -> bytes:
    """16 bytes of blake2b over the parts, each as type, length and text."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(f"parts of a stream's name are int or str; got {part!r}")
        kind = b"i" if isinstance(part, int) else b"s"
        text = str(part).encode()
        hasher.update(kind + len(text).to_bytes(8, "little") + text)
    return hasher.digest()
