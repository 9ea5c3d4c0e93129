"""Asynchronous DiLoCo between real processes: the order is the machine's, what is merged is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from processes import Cluster

from gossamer.sim.simulate import SimulationResult, simulate

Start = Callable[..., Cluster]


def run(
    cluster: Start, workers: int
) -> tuple[SimulationResult, list[torch.Tensor], dict[str, Any]]:
    """The simulator's run, the processes' parameters, and what the server has recorded."""
    given = {"inner_steps": 6, "local_steps": "equal"}
    processes = cluster(method="async_diloco", hyperparameters=given, workers=workers, rounds=5)
    processes.start_all()
    job = processes.job
    simulated = simulate(
        method=job.method, task=job.task, training=job.training, seed=job.seed, workers=workers
    )
    rows = []
    for _, end in sorted(processes.finish().items()):
        data = bytearray.fromhex(end["parameters"])
        rows.append(torch.frombuffer(data, dtype=torch.float32))
    (server,) = [process.wait("end")["summary"] for process in processes.syncers.values()]
    return simulated, rows, server["records"]


def test_one_worker_and_its_server_give_the_simulators_bits(cluster: Start) -> None:
    simulated, (row,), _ = run(cluster, 1)
    assert torch.equal(row, simulated.parameters[0])


def test_all_that_three_workers_send_is_merged_once(cluster: Start) -> None:
    simulated, rows, records = run(cluster, 3)
    merged = records["merged_samples"]
    assert merged == {"count": 15, "mean": simulated.summary["samples"] / 15}
    assert "refused_samples" not in records
    # Whatever the order is, each worker's last answer lies near where the simulator's does.
    moved = float((simulated.parameters - simulated.parameters.mean()).square().mean().sqrt())
    apart = float((torch.stack(rows) - simulated.parameters).square().mean().sqrt())
    assert apart < 0.3 * moved
