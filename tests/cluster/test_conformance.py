"""Every transport keeps the rules of `gossamer.comm.transport`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.cluster.certs import issue
from gossamer.testing.conformance import CHECKS
from gossamer.testing.harness import Harness
from gossamer.testing.loopback import LoopbackHarness
from gossamer.testing.simulated import SimHarness


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    issue(folder, 3)
    return folder


@pytest.fixture(params=["simulated", "simulated with latency", "loopback", "loopback with TLS"])
def harness(request: pytest.FixtureRequest, certs: Path) -> Harness:
    if request.param == "loopback":
        return LoopbackHarness()
    if request.param == "loopback with TLS":
        return LoopbackHarness(certs)
    return SimHarness(latency_s=0.02 if "latency" in request.param else 0.0)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_rules_hold(check: Callable[[Harness], None], harness: Harness) -> None:
    check(harness)
