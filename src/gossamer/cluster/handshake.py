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
    host, port = split_address(address)
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=_context(credentials), server_hostname=peer
            )
            try:
                # Only now does a server of TLS 1.3 say what it thinks of our certificate.
                await reader.read(1)
            finally:
                writer.transport.abort()
    except ssl.SSLCertVerificationError as error:
        return f"the certificate at {address} is not trusted: {error.verify_message}"
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if credentials is None:
            certificate = "certificate" in reason  # asked for ours, so it speaks TLS
            return _wants_tls(address) if certificate else None
        if "wrong version" in reason or "record layer" in reason:
            return f"{address} does not speak TLS; start it with certificates, or join without"
        return f"{address} refuses this certificate: {reason}"
    except OSError:
        return None  # nobody there, or gone again
    return _wants_tls(address) if credentials is None else None


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
