"""Processes that are shared by all tests of the cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Cluster, Forge, forge_in


@pytest.fixture(scope="session")
def forge_of_session() -> Iterator[Forge]:
    with tempfile.TemporaryDirectory() as folder, forge_in(Path(folder)) as forge:
        yield forge


@pytest.fixture
def forge(forge_of_session: Forge) -> Iterator[Forge]:
    yield forge_of_session
    forge_of_session.end_all()


@pytest.fixture
def cluster(forge: Forge, tmp_path: Path) -> Callable[..., Cluster]:
    """Starts a run's coordinator; the options are those of the job, see `programs`."""

    def start(**job: Any) -> Cluster:
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return Cluster(forge, folder, **job)

    return start
