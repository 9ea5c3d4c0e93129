"""Sizes, rates and durations as people write them: "100Mbit/s", "1.5B", "30 ms".

Plain numbers are taken in the base unit: seconds, bytes per second, parameters.
"""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator

_NUMBER = re.compile(r"^\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z/%]*)\s*$")

_DURATIONS = {"": 1.0, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0,
              "d": 86400.0, "w": 604800.0}  # fmt: skip
_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_RATES = {f"{p}bit/s": f / 8 for p, f in _DECIMAL.items()}
_RATES |= {f"{p}bps": f / 8 for p, f in _DECIMAL.items()}
_RATES |= {f"{p}B/s": f for p, f in (_DECIMAL | _BINARY).items()}
_RATES |= {"": 1.0}
_SIZES = {f"{p}B": f for p, f in (_DECIMAL | _BINARY).items()} | {"": 1.0}
_DURATION_MAX_S = 1e12  # 30 thousand years: its nanoseconds can still be counted
_COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def _parse(value: object, units: dict[str, float], what: str, example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{what} expected, such as {example}; got {value!r}")
    if isinstance(value, str):
        match = _NUMBER.match(value)
        if match is None or match.group(2) not in units:
            known = ", ".join(u for u in units if u)
            raise ValueError(f"{what} expected, such as {example}; got {value!r} (units: {known})")
        value = float(match.group(1)) * units[match.group(2)]
    if math.isnan(value):
        raise ValueError(f"{what} expected, such as {example}; got NaN")
    return float(value)


def parse_duration(value: object) -> float:
    """Seconds from "2.355s", "30 ms", "1.5h" or a number of seconds."""
    seconds = _parse(value, _DURATIONS, "a duration", '"30ms"')
    if abs(seconds) > _DURATION_MAX_S:
        raise ValueError(f"at most {_DURATION_MAX_S:g} s expected; got {value!r}")
    return seconds


def parse_rate(value: object) -> float:
    """Bytes per second from "100Mbit/s", "12.5 MB/s" or a number of bytes per second."""
    return _parse(value, _RATES, "a data rate", '"100Mbit/s"')


def parse_size(value: object) -> float:
    """Bytes from "64MB", "1 GiB" or a number of bytes."""
    return _parse(value, _SIZES, "a size", '"64MB"')


def parse_count(value: object) -> float:
    """A count from "1.5B" (1.5e9), "300k" or a number."""
    return _parse(value, _COUNTS, "a count", '"1.5B"')


Duration = Annotated[float, BeforeValidator(parse_duration)]
Rate = Annotated[float, BeforeValidator(parse_rate)]
Size = Annotated[float, BeforeValidator(parse_size)]
Count = Annotated[float, BeforeValidator(parse_count)]


def format_bytes(num_bytes: float) -> str:
    """ "3.00 GB"; decimal prefixes, as network equipment counts."""
    return _scaled(num_bytes, "B")


def format_rate(bytes_per_s: float) -> str:
    """ "100 Mbit/s"."""
    return _scaled(bytes_per_s * 8, "bit/s")


def format_count(count: float) -> str:
    """ "1.50B", "875k"."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.3g}{suffix}"
    return f"{count:.3g}"


def format_duration(seconds: float) -> str:
    """ "45.2 s", "3.5 min", "16.0 h", "12.3 d"; the largest unit that leaves at least one."""
    for limit, suffix in ((2 * 86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if abs(seconds) >= limit:
            unit = 86400.0 if suffix == "d" else limit
            return f"{seconds / unit:.1f} {suffix}"
    return f"{seconds:.3g} s"


def _scaled(value: float, unit: str) -> str:
    for limit, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
