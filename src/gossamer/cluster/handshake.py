"""Why a secure connection does not come about: gRPC calls all of it "unavailable".

A refused certificate stays refused, so whoever waits for a coordinator must tell it from a
coordinator that is away. Python's own TLS says which it is.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import tempfile
from pathlib import Path

from gossamer.cluster.addresses import split_address
from gossamer.cluster.certs import COORDINATOR, Credentials


async def tls_fault(
    address: str, credentials: Credentials | None, timeout_s: float, peer: str = COORDINATOR
) -> str | None:
    """What is wrong with the certificates of this connection, None where nothing is known to be."""
    try:
        if await _greeted(address, credentials, timeout_s, peer):
            return _wants_tls(address) if credentials is None else None
        # gRPC hangs up on a certificate without a word. So does a process that ends, but once.
        if await _greeted(address, credentials, timeout_s, peer):
            return None
    except ssl.SSLCertVerificationError as error:
        return f"the certificate at {address} is not trusted: {error.verify_message}"
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if credentials is None:  # asked for ours, so it speaks TLS
            return _wants_tls(address) if "certificate" in reason else None
        if "wrong version" in reason or "record layer" in reason:
            return f"{address} does not speak TLS; start it with certificates, or join without"
        return f"{address} refuses this certificate: {reason}"
    except OSError:
        return None  # nobody there, or gone again
    if credentials is None:
        return _wants_tls(address)
    return f"{address} refuses this certificate; was it issued by the same authority?"


async def _greeted(
    address: str, credentials: Credentials | None, timeout_s: float, peer: str
) -> bool:
    """Whether the server still speaks after it has seen our certificate. Raises `OSError`."""
    host, port = split_address(address)
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(
            host, port, ssl=_context(credentials), server_hostname=peer
        )
        try:
            return bool(await reader.read(1))
        except ConnectionError:
            return False
        finally:
            writer.transport.abort()


def _wants_tls(address: str) -> str:
    return f"{address} speaks TLS only; name the folder with the certificates"


def _context(credentials: Credentials | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    if credentials is None:  # to find out whether the other end speaks TLS at all
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    context = ssl.create_default_context(cadata=credentials.ca.decode())
    context.set_alpn_protocols(["h2"])
    with tempfile.TemporaryDirectory() as folder:  # which nobody else can read
        path = Path(folder) / "own.pem"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            file.write(credentials.key + b"\n" + credentials.certificate)
        context.load_cert_chain(path)
    return context
