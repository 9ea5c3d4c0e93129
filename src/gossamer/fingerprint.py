"""Whether two configurations are the same, and where they first differ."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical(document: Any) -> str:
    """A JSON document as text that is equal for equal documents. Raises `ValueError` for NaN."""
    return json.dumps(
        document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def fingerprint(document: Any) -> str:
    """32 hexadecimal digits that stand for a JSON document (blake2b of its canonical text)."""
    return hashlib.blake2b(canonical(document).encode(), digest_size=16).hexdigest()


def first_difference(saved: Any, now: Any, where: str = "") -> str | None:
    """The first setting in which two JSON documents differ, as text."""
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in sorted({*saved, *now}):
            found = first_difference(saved.get(key), now.get(key), f"{where}.{key}".strip("."))
            if found is not None:
                return found
        return None
    return None if saved == now else f"{where} was {saved!r} and is now {now!r}"
