"""Every transport keeps the rules of `gossamer.comm.transport` and of `gossamer.comm.letters`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gossamer.cluster.certs import issue
from gossamer.testing.conformance import CHECKS
from gossamer.testing.conformance_letters import LETTER_CHECKS
from gossamer.testing.harness import Harness, LetterHarness
from gossamer.testing.loopback import LoopbackHarness
from gossamer.testing.namespaced import NamespaceHarness, namespaced
from gossamer.testing.namespaces import missing
from gossamer.testing.simulated import SimHarness


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    issue(folder, 3)
    return folder


@pytest.fixture(scope="session")
def between_namespaces(certs: Path) -> Iterator[NamespaceHarness]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with namespaced(3, certs) as harness:
        yield harness


WORLDS = (
    "simulated",
    "simulated with latency",
    "loopback",
    "loopback with TLS",
    "namespaces with TLS",
)


@pytest.fixture(params=WORLDS)
def harness(request: pytest.FixtureRequest, certs: Path) -> Harness:
    if request.param == "namespaces with TLS":
        between: NamespaceHarness = request.getfixturevalue("between_namespaces")
        return between
    if request.param == "loopback":
        return LoopbackHarness()
    if request.param == "loopback with TLS":
        return LoopbackHarness(certs)
    return SimHarness(latency_s=0.02 if "latency" in request.param else 0.0)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_rules_hold(check: Callable[[Harness], None], harness: Harness) -> None:
    check(harness)


@pytest.mark.parametrize("check", LETTER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("world", ["simulated", "simulated with latency", "loopback with TLS"])
def test_the_rules_of_letters_hold(
    check: Callable[[LetterHarness], None], world: str, certs: Path
) -> None:
    if world == "loopback with TLS":
        check(LoopbackHarness(certs))
    else:
        check(SimHarness(latency_s=0.02 if "latency" in world else 0.0))
