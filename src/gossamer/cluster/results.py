"""What a worker leaves in its folder when it has finished."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossamer.cluster.tensor_file import write_tensors
from gossamer.training.replica import Replica


def write_results(root: Path, summary: dict[str, Any], replica: Replica | None) -> None:
    """`summary.json`, and `final.safetensors` of a worker that has a state; each atomic.

    Raises `OSError` where the disk is full or may not be written to; nothing half-written stays.
    """
    root.mkdir(parents=True, exist_ok=True)
    if replica is not None:
        tensors = {
            "parameters": replica.parameters,
            "buffers": replica.buffers,
            "counters": replica.counters,
        }
        _appear(root / "final.safetensors", lambda path: write_tensors(path, tensors))
    text = json.dumps(summary, indent=1)
    _appear(root / "summary.json", lambda path: path.write_text(text, encoding="utf-8"))


def _appear(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside `path`, and give it its name when it is complete."""
    partial = path.with_name(f".{path.stem}.partial")
    try:
        write(partial)
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error}") from None
