"""The cluster and the simulator give the same bits: four processes over gRPC, five rounds each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Cluster

from gossamer.sim.simulate import simulate

METHODS: list[tuple[str, dict[str, Any]]] = [
    ("data_parallel", {"inner_steps": 6}),
    ("local_sgd", {"inner_steps": 6}),
    ("diloco", {"inner_steps": 6}),
    ("diloco", {"inner_steps": 6, "codec": "int8", "error_feedback": True}),
    ("GlobalM1", {"inner_steps": 6}),
    ("GlobalM1S", {"inner_steps": 6}),
    ("GlobalM1LocalM2", {"inner_steps": 6}),
    ("GlobalM1LocalM2", {"inner_steps": 6, "mix2_subset": ["2.*"]}),
    ("GlobalM1LocalM2", {"inner_steps": 6, "js_threshold": 0.0}),
    ("LocalM1M2", {"inner_steps": 6}),
    ("local_mixvr", {"inner_steps": 6, "alpha": 0.4}),
    ("minibatch_sgd", {"inner_steps": 6}),
    ("minibatch_asgd", {"inner_steps": 6, "form": "ac_sa"}),
    ("local_momentum", {"inner_steps": 6}),
    ("slowcal_sgd", {"inner_steps": 6}),
    ("fedac", {"inner_steps": 6}),
    ("mu2_sgd", {"inner_steps": 6}),
    ("anytime_sgd", {"inner_steps": 6}),
    ("storm", {"inner_steps": 6}),
    ("gasloc", {"inner_steps": 6}),
    ("gasloc", {"inner_steps": 6, "form": "B", "topology": "random_ring"}),
    ("gasloc", {"inner_steps": 6, "topology": "ring", "alpha": "auto", "gamma": "auto"}),
    ("noloco", {"inner_steps": 6}),
    ("noloco", {"inner_steps": 6, "group_size": 3}),
    ("dsgd", {"inner_steps": 6}),
    ("dsgd", {"inner_steps": 6, "order": "adapt_then_combine", "topology": "random_pairs"}),
    ("dsgd", {"inner_steps": 6, "local_steps": 2}),
    ("sgp", {"inner_steps": 6}),
    ("streaming_diloco", {"inner_steps": 6, "fragments": 3, "fragmentation": "balanced"}),
    ("eager_diloco", {"inner_steps": 6}),
    ("slowmo", {"inner_steps": 6}),
    ("slowmo", {"inner_steps": 6, "base": "gossip"}),
    # What does not wait for meetings depends on when they arrive, and so on the machine.
    ("ad_psgd", {"inner_steps": 6, "wait_for_meetings": True}),
    ("a2cid2", {"inner_steps": 6, "wait_for_meetings": True, "topology": "ring"}),
]


@pytest.mark.parametrize(
    ("method", "hyperparameters"),
    METHODS,
    ids=["-".join([name, *list(given)[1:]]) for name, given in METHODS],
)
def test_a_cluster_run_equals_the_simulators_bit_for_bit(
    cluster: Callable[..., Cluster], method: str, hyperparameters: dict[str, Any]
) -> None:
    run = cluster(method=method, hyperparameters=hyperparameters, workers=4, rounds=5, hidden=800)
    run.start_all()
    job = run.job
    simulated = simulate(method=job.method, task=job.task, training=job.training, seed=job.seed)
    ends = run.finish()
    for worker, end in ends.items():
        data = bytearray.fromhex(end["parameters"])
        parameters = torch.frombuffer(data, dtype=torch.float32)
        assert torch.equal(parameters, simulated.parameters[worker]), worker
    sent = {
        kind: sum(end["summary"]["bytes_by_kind"][kind] for end in ends.values())
        for kind in ends[0]["summary"]["bytes_by_kind"]
    }
    assert sent == simulated.summary["bytes_by_kind"]
    assert sum(end["summary"]["samples"] for end in ends.values()) == simulated.summary["samples"]
    assert all(end["summary"]["failed_transfers"] == 0 for end in ends.values())


@pytest.mark.parametrize("method", ["ad_psgd", "a2cid2"])
def test_steps_that_do_not_wait_hold_the_same_meetings(
    cluster: Callable[..., Cluster], method: str
) -> None:
    """What they add up to depends on the machine's speed, a little; who meets whom does not."""
    given = {"inner_steps": 6, "topology": "ring"}
    run = cluster(method=method, hyperparameters=given, workers=4, rounds=5)
    run.start_all()
    job = run.job
    simulated = simulate(method=job.method, task=job.task, training=job.training, seed=job.seed)
    ends = run.finish()
    rows = []
    for _, end in sorted(ends.items()):
        data = bytearray.fromhex(end["parameters"])
        rows.append(torch.frombuffer(data, dtype=torch.float32))
    sent = sum(end["summary"]["bytes_by_kind"]["meetings"] for end in ends.values())
    assert sent == simulated.summary["bytes_by_kind"]["meetings"]
    assert all(end["summary"]["failed_transfers"] == 0 for end in ends.values())
    moved = float((simulated.parameters - simulated.parameters.mean()).square().mean().sqrt())
    apart = float((torch.stack(rows) - simulated.parameters).square().mean().sqrt())
    assert apart < 0.1 * moved
