"""Make the shipped digits from scikit-learn's copy of them; needs scikit-learn.

    python benchmarks/make_digits.py src/gossamer/data/digits

1797 images of 8 x 8 in 17 grey levels. Every fifth one of each class is held out.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


def write_idx(path: Path, values: np.ndarray) -> None:
    """Unsigned bytes as a packed IDX file, without a time stamp: the same bytes every time."""
    header = bytes([0, 0, 8, values.ndim])
    header += b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(gzip.compress(header + values.astype(np.uint8).tobytes(), mtime=0))


def main(folder: Path) -> None:
    digits = load_digits()
    ranks = np.zeros(len(digits.target), dtype=int)
    for digit in range(10):  # by class: in the whole set the classes come in cycles
        ranks[digits.target == digit] = np.arange((digits.target == digit).sum())
    held_out = ranks % 5 == 0
    folder.mkdir(parents=True, exist_ok=True)
    for part, chosen in (("train", ~held_out), ("t10k", held_out)):
        write_idx(folder / f"{part}-images-idx3-ubyte.gz", digits.images[chosen])
        write_idx(folder / f"{part}-labels-idx1-ubyte.gz", digits.target[chosen])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
