"""Files that are either the old or the new content, never half of it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write `path` by way of a file beside it, so that a reader or a crash sees old or new.

    Raises `OSError`, with nothing left beside it, where the disk is full or may not be written to.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: what is not finite becomes null (JSON has no NaN)."""
    return json.dumps(_clean(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
