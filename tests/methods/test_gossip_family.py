"""The gossip family in the simulated world: resuming, losses, one worker, buffers, no numerics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import Interrupted
from gossamer.measure.settings import Measure
from gossamer.methods import ADPSGD, DSGD, SGP, A2CiD2, Method, NoLoCo, SlowMo
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults, Hang, Partition
from gossamer.sim.listener import NullListener, StopFlag
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.problems import TinyMLP
from gossamer.training.settings import Training

METHODS: list[Method] = [
    NoLoCo(inner_steps=3),
    NoLoCo(inner_steps=3, group_size=3),
    DSGD(inner_steps=3),
    DSGD(inner_steps=3, order="adapt_then_combine", local_steps=1, topology="random_pairs"),
    ADPSGD(inner_steps=3),
    ADPSGD(inner_steps=3, wait_for_meetings=True),
    SGP(inner_steps=3),
    SGP(inner_steps=3, topology="star"),
    A2CiD2(inner_steps=3, topology="ring"),
    SlowMo(inner_steps=3),
    SlowMo(inner_steps=3, base="gossip"),
]
# Jitter and unequal links spread the workers, so that their rounds overlap on the links.
NETWORK = Network(
    bandwidth="1MB/s", latency="50ms", failure_probability=0.1, deadline="60s",
    workers=[{"worker": 1, "bandwidth": "0.4MB/s"}],
)  # fmt: skip
TIMING = Timing(step_time=1.0, parameters=3e5, jitter=0.3, speeds=[1.0, 0.8, 1.3, 1.0, 0.9])

every_method = pytest.mark.parametrize(
    "method", METHODS, ids=lambda m: f"{m.name}{METHODS.index(m)}"
)


def run(method: Method, **given_: Any) -> SimulationResult:
    given_.setdefault("task", TinyMLP())
    given_.setdefault("workers", 5)
    given_.setdefault("rounds", 6)
    given_.setdefault("network", NETWORK)
    given_.setdefault("timing", TIMING)
    given_.setdefault("measure", Measure(every=2))
    given_.setdefault("training", Training(learning_rate=0.02, warmup_steps=5))
    return simulate(method=method, seed=5, **given_)


class StopAfter(NullListener):
    """Asks the run to stop once it has reported some round."""

    def __init__(self, round_index: int, stop: StopFlag) -> None:
        self._round, self._stop = round_index, stop

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "round" and fields["round"] >= self._round:
            self._stop.request()


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("after", [1, 3])
@every_method
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    method: Method, after: int, crashes: bool, tmp_path: Path
) -> None:
    crash = CrashAt(worker=2, start=5, return_after=6)
    faults = Faults(crashes=[crash] if crashes else [])
    whole = run(method, faults=faults)
    stop = StopFlag()
    with pytest.raises(Interrupted):
        run(method, faults=faults, checkpoint_dir=tmp_path, stop=stop,
            listener=StopAfter(after, stop))  # fmt: skip
    resumed = run(method, faults=faults, resume=tmp_path)
    assert torch.equal(resumed.parameters, whole.parameters)
    assert resumed.history == whole.history
    assert resumed.summary == whole.summary
    assert resumed.ledger.entries() == whole.ledger.entries()


@every_method
def test_a_crashed_worker_returns_with_a_donors_state(method: Method) -> None:
    result = run(
        method, rounds=10, faults=Faults(crashes=[CrashAt(worker=2, start=4, return_after=8)])
    )
    joined = [event["worker"] for event in result.history if event["kind"] == "joined"]
    assert joined == [2]
    assert result.workers == (0, 1, 2, 3, 4)
    assert result.summary["eval_loss"] < run(method, rounds=1).summary["eval_loss"]


@every_method
def test_a_crash_for_good_leaves_the_others_running(method: Method) -> None:
    result = run(method, faults=Faults(crashes=[CrashAt(worker=1, start=7)]))
    assert result.workers == (0, 2, 3, 4)
    assert bool(torch.isfinite(result.parameters).all())


@every_method
def test_a_partition_and_a_hang_end_and_all_go_on(method: Method) -> None:
    faults = Faults(
        partitions=[Partition(groups=[[0, 1], [2, 3, 4]], start=5, duration=20)],
        hangs=[Hang(worker=3, start=40, duration=15)],
    )
    result = run(method, faults=faults, rounds=15)
    assert result.summary["rounds"] == 15
    assert result.workers == (0, 1, 2, 3, 4)


@every_method
def test_one_worker_sends_nothing_and_trains_alone(method: Method) -> None:
    quick = Network()
    one = run(method, workers=1, timing=Timing(), network=quick)
    assert one.summary["bytes_sent_total"] == 0
    assert one.summary["utilization"] == 1.0
    if isinstance(method, NoLoCo | SlowMo):
        return  # outer momentum works alone, too
    alone = run(DSGD(inner_steps=3, topology="complete"), workers=1, timing=Timing(), network=quick)
    assert torch.allclose(one.parameters, alone.parameters, rtol=0, atol=1e-6)


@every_method
def test_without_numerics_time_and_bytes_are_the_same(method: Method) -> None:
    real = run(method)
    none = run(method, numerics="none")
    for name in ("time_s", "bytes_by_kind", "utilization", "samples", "failed_transfers"):
        assert none.summary[name] == real.summary[name], name


class Counting(nn.Module):
    """A linear map, a running mean of its inputs and a counter of its batches."""

    mean: Tensor
    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(inputs.mean(0), 0.1)
            self.batches += 1
        output: Tensor = self.linear(inputs)
        return output


class WithBuffers(TinyMLP):
    """TinyMLP's data for `Counting`."""

    def build(self) -> nn.Module:  # type: ignore[override]
        return Counting()


@every_method
def test_buffers_are_mixed_as_well(method: Method) -> None:
    result = run(method, task=WithBuffers(), workers=4, timing=Timing(), network=Network())
    sent = result.summary["bytes_by_kind"]
    assert sent["buffers"] > 0 and sent["counters"] > 0
    assert int(result.averaged["batches"]) == 18


class Poisoned(TinyMLP):
    """The loss of worker 1 is NaN from its eighth step on."""

    def train_batch(self, worker: int, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().train_batch(worker, step)
        return inputs, targets * (float("nan") if worker == 1 and step >= 7 else 1.0)


@every_method
def test_a_worker_that_diverges_ends_and_reaches_nobody(method: Method) -> None:
    result = run(method, task=Poisoned())
    assert result.workers == (0, 2, 3, 4)
    assert [lost["cause"] for lost in result.summary["lost"]] == ["non_finite"]
    assert bool(torch.isfinite(result.parameters).all())
