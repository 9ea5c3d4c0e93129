"""Methods with syncers between real processes: parity, and what kill -9 costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Cluster

from gossamer.sim.simulate import simulate

Start = Callable[..., Cluster]

# All M are waited for, and the update is due at once: nothing is left to the machine's speed.
IN_STEP: dict[str, Any] = {"inner_steps": 6, "quorum": 4, "due_steps": 0}


@pytest.mark.parametrize(
    "given",
    [
        {"fragments": 1, "merge": "average"},
        {"fragments": 3},
        {"fragments": 3, "syncers": 2, "codec": "int8", "codec_down": "bf16"},
    ],
    ids=["one-fragment", "fragments", "two-syncers-and-codecs"],
)
def test_a_run_that_waits_for_all_equals_the_simulators_bit_for_bit(
    cluster: Start, given: dict[str, Any]
) -> None:
    run = cluster(
        method="decoupled_diloco", hyperparameters={**IN_STEP, **given}, workers=4, rounds=5,
        hidden=800,
    )  # fmt: skip
    run.start_all()
    job = run.job
    simulated = simulate(method=job.method, task=job.task, training=job.training, seed=job.seed)
    ends = run.finish()
    for worker, end in ends.items():
        parameters = torch.frombuffer(bytearray.fromhex(end["parameters"]), dtype=torch.float32)
        assert torch.equal(parameters, simulated.parameters[worker]), worker
    syncers = [process.wait("end")["summary"] for process in run.syncers.values()]
    sent = {
        kind: sum(s["bytes_by_kind"].get(kind, 0) for s in syncers)
        + sum(end["summary"]["bytes_by_kind"].get(kind, 0) for end in ends.values())
        for kind in simulated.summary["bytes_by_kind"]
    }
    assert sent == simulated.summary["bytes_by_kind"]
