"""A private certificate authority for one cluster, and what each process loads of it.

A peer is known by its name, `coordinator`, `worker-<i>` or `syncer-<i>`, which is its certificate's
common name and one of its alternative names. Whoever connects verifies that name rather than an
address, so a worker may move, and nobody who holds another worker's certificate can pass for it.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gossamer.errors import ConfigError

COORDINATOR = "coordinator"
VALID_FOR = timedelta(days=365)
_CLOCK_SKEW = timedelta(hours=1)
_WARN_BEFORE = timedelta(days=14)
_log = logging.getLogger(__name__)


def worker_name(worker: int) -> str:
    """The name of a worker's certificate."""
    return f"worker-{worker}"


def place_name(place: int, num_workers: int | None = None) -> str:
    """The name of the process at a place; those after the workers' are syncers.

    Args:
        num_workers: of the run; None: all are workers.
    """
    if num_workers is None or place < num_workers:
        return worker_name(place)
    return f"syncer-{place - num_workers}"


def place_of(name: str, num_workers: int) -> int | None:
    """The reverse of `place_name`; None for any other name."""
    role, _, index = name.partition("-")
    if not (index.isascii() and index.isdigit()):
        return None
    if role == "syncer":
        return num_workers + int(index)
    return int(index) if role == "worker" and int(index) < num_workers else None


# -------------------------------------------------------------------------------------- to issue


def issue(
    folder: Path,
    num_workers: int,
    hosts: Sequence[str] = (),
    *,
    extend: bool = False,
    num_syncers: int = 0,
) -> list[Path]:
    """Write an authority, and a certificate for the coordinator, each worker and each syncer.

    Args:
        folder: where `ca.pem`, `ca-key.pem`, `NAME.pem` and `NAME-key.pem` go; keys are readable by
            their owner only.
        num_workers: certificates for workers 0 .. num_workers - 1.
        hosts: further names and addresses to put into every certificate.
        num_syncers: certificates for syncers 0 .. num_syncers - 1.
        extend: keep the authority and certificates that are there, and write the missing ones.

    Returns the files written. Raises `ConfigError` where it would overwrite one.
    """
    if num_workers < 1:
        raise ConfigError(f"at least one worker, got {num_workers}")
    places = range(num_workers + num_syncers)
    names = [COORDINATOR, *(place_name(place, num_workers) for place in places)]
    alternatives = [_alternative(host) for host in hosts]
    present = sorted(p.name for p in folder.glob("*.pem")) if folder.is_dir() else []
    if present and not extend:
        raise ConfigError(
            f"{folder} holds certificates already ({present[0]}, ...); give an empty folder, or "
            f"--extend to add what is missing"
        )
    if extend and not {"ca.pem", "ca-key.pem"} <= set(present):
        raise ConfigError(f"{folder} has no ca.pem and ca-key.pem to extend")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    written: list[Path] = []
    if extend:
        authority = _load_certificate(folder / "ca.pem")
        key = _load_key(folder / "ca-key.pem")
        names = [name for name in names if f"{name}.pem" not in present]
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        authority = _authority(key)
        written += _write(folder, "ca", authority, key)
    for name in names:
        own_key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(name, own_key, authority, key, alternatives)
        written += _write(folder, name, certificate, own_key)
    return written


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise ConfigError(f"a host name or an address is wanted, got {host!r}") from None


def _name(common_name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Gossamer"),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + VALID_FOR)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    # The serial number in the name keeps two clusters' authorities apart in error messages.
    name = _name(f"Gossamer cluster {x509.random_serial_number() % 16**8:08x}")
    public = key.public_key()
    return (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    alternatives: Sequence[x509.GeneralName],
) -> x509.Certificate:
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    own_key = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    names = x509.SubjectAlternativeName([x509.DNSName(name), *alternatives])
    return (
        _builder(_name(name), authority.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(names, critical=False)
        .add_extension(own_key, critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _write(
    folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> list[Path]:
    encoded_key = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    files = [folder / f"{name}-key.pem", folder / f"{name}.pem"]
    _write_new(files[0], encoded_key, 0o600)
    _write_new(files[1], certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return files


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """Never opens a file that is there, and never lets others see a key even for a moment."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


# --------------------------------------------------------------------------------------- to use


@dataclass(frozen=True)
class Credentials:
    """Who this process is, and whom it trusts.

    Args:
        name: `coordinator`, `worker-<i>` or `syncer-<i>`.
        ca: the authority's certificate, PEM.
        certificate, key: this process's own, PEM.
        expires: when the first of the two certificates does.
    """

    name: str
    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    expires: datetime

    @classmethod
    def load(cls, folder: Path | str, name: str, *, now: datetime | None = None) -> Credentials:
        """Read and check `ca.pem`, `NAME.pem` and `NAME-key.pem` of a folder.

        Raises `ConfigError` where one is missing, damaged, expired or does not fit the others.
        """
        folder, now = Path(folder), now or datetime.now(UTC)
        authority = _load_certificate(folder / "ca.pem")
        own_path, key_path = folder / f"{name}.pem", folder / f"{name}-key.pem"
        own, key = _load_certificate(own_path), _load_key(key_path)
        _check_validity(authority, folder / "ca.pem", now)
        _check_validity(own, own_path, now)
        try:
            own.verify_directly_issued_by(authority)
        except (InvalidSignature, ValueError, TypeError):
            raise ConfigError(
                f"{own_path} was not issued by the authority in {folder / 'ca.pem'}; take both "
                f"from the same `gossamer certs`"
            ) from None
        if own.public_key() != key.public_key():
            raise ConfigError(f"{key_path} is not the key of {own_path}; take both from one place")
        if common_name(own) != name:
            raise ConfigError(f"{own_path} is for {common_name(own)!r}, not {name!r}")
        _warn_of(own, own_path, key_path, now)
        pem = serialization.Encoding.PEM
        expires = min(own.not_valid_after_utc, authority.not_valid_after_utc)
        return cls(
            name, authority.public_bytes(pem), own.public_bytes(pem), key_path.read_bytes(), expires
        )

    def for_server(self) -> grpc.ServerCredentials:
        """To listen with: only peers with a certificate of the same authority are let in."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.ca, require_client_auth=True
        )

    def for_channel(self) -> grpc.ChannelCredentials:
        """To connect with; see `channel_options` as well."""
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)


def channel_options(peer: str) -> list[tuple[str, str]]:
    """The options that make a secure channel verify that its other end is `peer`."""
    return [("grpc.ssl_target_name_override", peer)]


def common_name(certificate: x509.Certificate) -> str:
    """The name that a certificate is for."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _load_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"cannot read the certificate {path}: {error.strerror}; `gossamer certs` makes them"
        ) from None
    except ValueError:
        raise ConfigError(f"{path} is not a certificate in PEM form") from None


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}") from None
    except (ValueError, TypeError):
        raise ConfigError(f"{path} is not a key in PEM form without a password") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} is not an elliptic-curve key; make one with `gossamer certs`")
    return key


def _check_validity(certificate: x509.Certificate, path: Path, now: datetime) -> None:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise ConfigError(f"{path} expired on {end:%Y-%m-%d}; make new ones with `gossamer certs`")
    if now < start:
        raise ConfigError(
            f"{path} is not valid before {start:%Y-%m-%d %H:%M} UTC; is this machine's clock right?"
        )


def _warn_of(certificate: x509.Certificate, path: Path, key_path: Path, now: datetime) -> None:
    left = certificate.not_valid_after_utc - now
    if left < _WARN_BEFORE:
        _log.warning("%s expires in %d days; make new ones with `gossamer certs`", path, left.days)
    if key_path.stat().st_mode & 0o077:
        _log.warning("%s can be read by others; `chmod 600` it", key_path)


def certified_worker(folder: Path, role: str = "worker") -> int:
    """Whose certificate a folder holds, where it is one worker's. Raises `ConfigError`.

    Args:
        role: "worker" or "syncer".
    """
    found = sorted(p.stem for p in folder.glob(f"{role}-*.pem") if not p.stem.endswith("-key"))
    if len(found) != 1:
        raise ConfigError(
            f"{folder} holds the certificates of {len(found)} {role}s; say which of them this "
            f"process is (--index)"
        )
    index = found[0].removeprefix(f"{role}-")
    if not index.isdigit():
        raise ConfigError(f"{folder / found[0]}.pem is not the certificate of a {role}")
    return int(index)
