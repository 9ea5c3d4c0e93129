"""Certificates: made once, checked when loaded, and believed by OpenSSL's rules."""

from __future__ import annotations

import logging
import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from gossamer.cli import run
from gossamer.cluster.certs import VALID_FOR, Credentials, common_name, issue, worker_name
from gossamer.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs") / "made"
    issue(folder, 2, ["10.0.0.5", "fe80::1", "node.example"])
    return folder


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_each_process_gets_a_certificate_and_a_key(folder: Path) -> None:
    names = ["ca", "coordinator", "worker-0", "worker-1"]
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        f"{name}{end}.pem" for name in names for end in ("", "-key")
    )
    for name in names:
        assert stat.S_IMODE((folder / f"{name}-key.pem").stat().st_mode) == 0o600
    for name in names[1:]:
        made = certificate(folder / f"{name}.pem")
        assert common_name(made) == name
        san = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert san.get_values_for_type(x509.DNSName) == [name, "node.example"]
        assert [str(a) for a in san.get_values_for_type(x509.IPAddress)] == ["10.0.0.5", "fe80::1"]
        basic = made.extensions.get_extension_for_class(x509.BasicConstraints).value
        assert not basic.ca
        lifetime = made.not_valid_after_utc - datetime.now(UTC)
        assert timedelta(days=364) < lifetime <= VALID_FOR
    serials = {certificate(folder / f"{name}.pem").serial_number for name in names}
    assert len(serials) == len(names)


def test_credentials_load_and_hide_the_key(folder: Path) -> None:
    credentials = Credentials.load(folder, worker_name(1))
    assert credentials.name == "worker-1"
    assert "PRIVATE" not in repr(credentials)
    assert credentials.key.startswith(b"-----BEGIN PRIVATE KEY-----")


def test_nothing_is_overwritten(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="holds certificates already"):
        issue(folder, 4)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_workers_can_be_added(folder: Path, tmp_path: Path) -> None:
    grown = tmp_path / "grown"
    shutil.copytree(folder, grown)
    written = issue(grown, 3, extend=True)
    assert [path.name for path in written] == ["worker-2-key.pem", "worker-2.pem"]
    for worker in range(3):
        Credentials.load(grown, worker_name(worker))
    with pytest.raises(ConfigError, match=r"no ca\.pem and ca-key\.pem"):
        issue(tmp_path / "nowhere", 3, extend=True)


@pytest.mark.parametrize(("workers", "host"), [(0, "a"), (1, "exämple.org")])
def test_what_cannot_be_made_is_refused(tmp_path: Path, workers: int, host: str) -> None:
    with pytest.raises(ConfigError):
        issue(tmp_path / "new", workers, [host])
    assert not (tmp_path / "new").exists()


def broken(folder: Path, tmp_path: Path, **files: str | bytes | None) -> Path:
    """A copy with files replaced by another file, by bytes, or removed."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for name, content in files.items():
        path = copy / f"{name.replace('_', '-')}.pem"
        path.unlink()
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            shutil.copy(copy / content, path)
    return copy


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"ca": None}, r"cannot read the certificate .*ca\.pem: No such file"),
        ({"worker_0": None}, r"cannot read the certificate .*worker-0\.pem"),
        ({"worker_0_key": None}, "cannot read the key"),
        ({"worker_0": b"nonsense"}, "not a certificate in PEM form"),
        ({"worker_0_key": b"nonsense"}, "not a key in PEM form"),
        ({"worker_0_key": "worker-1-key.pem"}, "is not the key of"),
        ({"worker_0": "worker-1.pem", "worker_0_key": "worker-1-key.pem"}, "is for 'worker-1'"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, files: dict[str, str | bytes | None], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        Credentials.load(broken(folder, tmp_path, **files), "worker-0")


def test_another_authority_is_refused(folder: Path, tmp_path: Path) -> None:
    issue(tmp_path / "other", 1)
    mixed = broken(folder, tmp_path, ca=(tmp_path / "other" / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match="was not issued by the authority"):
        Credentials.load(mixed, "worker-0")


def test_time_is_checked(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = datetime.now(UTC)
    with pytest.raises(ConfigError, match=r"ca\.pem expired on"):
        Credentials.load(folder, "worker-0", now=now + timedelta(days=366))
    with pytest.raises(ConfigError, match="is this machine's clock right"):
        Credentials.load(folder, "worker-0", now=now - timedelta(days=1))
    Credentials.load(folder, "worker-0", now=now + timedelta(days=300))
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        Credentials.load(folder, "worker-0", now=now + timedelta(days=360))
    assert "expires in 4 days" in caplog.text


def test_the_command_makes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "certs"
    assert run(["certs", "--out", str(out), "--workers", "1", "--host", "10.1.2.3"]) == 0
    Credentials.load(out, "worker-0")
    Credentials.load(out, "coordinator")
    assert "ca-key.pem stays with you" in capsys.readouterr().err
    assert run(["certs", "--out", str(out), "--workers", "1"]) == 2
    assert "holds certificates already" in capsys.readouterr().err
    assert run(["certs", "--out", str(out), "--workers", "2", "--extend", "--json"]) == 0
    assert '"worker-1.pem"' in capsys.readouterr().out
