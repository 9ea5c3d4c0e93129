"""Addresses as people write them, and whether somebody listens there."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from typing import Literal

from gossamer.errors import ConfigError

Answer = Literal["accepted", "refused", "silent"]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT" or "[IPv6]:PORT". Raises `ConfigError`."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"an address is HOST:PORT or [IPV6]:PORT, got {address!r}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The reverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can mean this one by it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of a machine, and so is none to connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host in ("", "*")


async def dial(address: str, timeout_s: float) -> Answer:
    """Open a connection and close it: what the machine at `address` says to that."""
    host, port = split_address(address)
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return "refused"
    except OSError:  # which includes the timeout, unknown hosts and missing routes
        return "silent"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return "accepted"
