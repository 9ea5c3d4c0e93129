"""A resumed run is the uninterrupted run, bit for bit: parameters, trace, ledger, history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from gossamer.errors import CheckpointError, ConfigError, Interrupted, RunFailed
from gossamer.measure.settings import Measure
from gossamer.methods import (
    DataParallel,
    DiLoCo,
    EagerDiLoCo,
    FactoredGossip,
    GASLoC,
    LocalSGD,
    Method,
    StreamingDiLoCo,
)
from gossamer.sim import checkpoint
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults, Hang, Outage
from gossamer.sim.listener import NullListener, StopFlag
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.problems import TinyMLP
from gossamer.training.settings import Training

METHODS: list[Method] = [
    DataParallel(inner_steps=3),
    LocalSGD(inner_steps=3),
    DiLoCo(inner_steps=3),
    FactoredGossip(inner_steps=3, mix1="global", mix2="pair"),
    FactoredGossip(inner_steps=3, mix1="pair", mix2="pair", js_threshold=0.01),
    FactoredGossip(inner_steps=3, mix1="pair", mix2="none", mix_momentum=True),
    GASLoC(inner_steps=4, topology="random_ring", form="B", local_steps="by_time"),
    StreamingDiLoCo(inner_steps=4, fragments=2, fragmentation="balanced"),
    EagerDiLoCo(inner_steps=3),
    FactoredGossip(inner_steps=3, mix1="global", mix2="global", codec="int4", error_feedback=True),
]
# Jitter and unequal links spread the workers' boundaries, so that transfers of both sides of a
# boundary share the links.
NETWORK = Network(
    bandwidth="1MB/s", latency="50ms", failure_probability=0.1, deadline="60s",
    workers=[{"worker": 1, "bandwidth": "0.4MB/s"}],
)  # fmt: skip
TIMING = Timing(step_time=1.0, parameters=1e6, jitter=0.3, speeds=[1.0, 0.8, 1.3, 1.0, 0.9])


class StopAfter(NullListener):
    """Asks the run to stop once it has reported some round."""

    def __init__(self, round_index: int, stop: StopFlag) -> None:
        self._round, self._stop = round_index, stop

    def on_event(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "round" and fields["round"] >= self._round:
            self._stop.request()


def run(method: Method, **given_: Any) -> SimulationResult:
    given_.setdefault("network", NETWORK)
    return simulate(
        method=method, task=TinyMLP(), workers=5, rounds=7, seed=5, timing=TIMING,
        training=Training(learning_rate=0.02, warmup_steps=5), measure=Measure(every=2), **given_,
    )  # fmt: skip


def interrupted(method: Method, folder: Path, after: int, **given_: Any) -> None:
    stop = StopFlag()
    with pytest.raises(Interrupted):
        run(method, checkpoint_dir=folder, stop=stop, listener=StopAfter(after, stop), **given_)


def assert_same(one: SimulationResult, other: SimulationResult) -> None:
    assert torch.equal(one.parameters, other.parameters)
    assert one.history == other.history
    assert one.summary == other.summary
    assert one.ledger.entries() == other.ledger.entries()


@pytest.mark.parametrize("after", [1, 3, 5])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_resume_at_a_round_boundary(method, after, tmp_path):
    whole = run(method)
    interrupted(method, tmp_path, after)
    assert_same(run(method, resume=tmp_path), whole)


def test_a_stop_before_the_start_saves_the_first_boundary(tmp_path):
    stop = StopFlag()
    stop.request()
    with pytest.raises(Interrupted, match="saved after round 1 of 7"):
        run(METHODS[2], checkpoint_dir=tmp_path, stop=stop)
    assert_same(run(METHODS[2], resume=tmp_path), run(METHODS[2]))


def test_resume_twice_and_from_periodic_checkpoints(tmp_path):
    method = METHODS[3]
    whole = run(method)
    run(method, checkpoint_dir=tmp_path / "a", checkpoint_every=2)
    kept = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert kept == ["round-000004", "round-000006"]
    assert_same(run(method, resume=tmp_path / "a" / "round-000004"), whole)
    interrupted(method, tmp_path / "b", 1)
    interrupted(method, tmp_path / "b", 3, resume=tmp_path / "b")
    assert_same(run(method, resume=tmp_path / "b"), whole)


PLANS = [
    Faults(crashes=[CrashAt(worker=2, start=14, return_after=8)]),
    Faults(crashes=[CrashAt(worker=2, start=14)], outages=[Outage(worker=4, start=30, duration=9)]),
    Faults(hangs=[Hang(worker=0, start=11, duration=25)], rejoin_moments="reset"),
    Faults(crash_rate=6, mean_downtime="10s", outage_rate=60, mean_outage="3s"),
]


@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("plan", range(len(PLANS)))
@pytest.mark.parametrize("method", [METHODS[2], METHODS[3]], ids=lambda m: m.name)
def test_resume_under_faults(method, plan, after, tmp_path):
    whole = run(method, faults=PLANS[plan])
    interrupted(method, tmp_path, after, faults=PLANS[plan])
    assert_same(run(method, faults=PLANS[plan], resume=tmp_path), whole)


moments = st.floats(min_value=0.5, max_value=60, allow_nan=False)
spans = st.floats(min_value=0.5, max_value=40, allow_nan=False)
victims = st.integers(0, 4)


@settings(
    deadline=None, max_examples=25, derandomize=True, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    method=st.sampled_from(METHODS[1:]),
    after=st.integers(1, 5),
    faults=st.builds(
        Faults,
        outages=st.lists(
            st.builds(Outage, worker=victims, start=moments, duration=spans), max_size=1
        ),
        hangs=st.lists(st.builds(Hang, worker=victims, start=moments, duration=spans), max_size=1),
        crashes=st.lists(
            st.builds(CrashAt, worker=victims, start=moments, return_after=spans), max_size=2
        ),
    ),
)
def test_resume_under_any_fault_plan(method, after, faults, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    try:
        whole = run(method, faults=faults)
        interrupted(method, folder, after, faults=faults)
    except RunFailed:
        return
    if not list(folder.glob("round-*")):
        return  # somebody died or returned at each boundary that was left
    assert_same(run(method, faults=faults, resume=folder), whole)


def test_another_configuration_is_refused_by_name(tmp_path):
    interrupted(METHODS[2], tmp_path, 2)
    other = DiLoCo(inner_steps=3, outer_momentum=0.5)
    with pytest.raises(ConfigError, match=r"method.outer_momentum was 0.9 and is now 0.5"):
        run(other, resume=tmp_path)
    with pytest.raises(ConfigError, match="no checkpoint in"):
        run(METHODS[2], resume=tmp_path / "nowhere")


def test_damaged_checkpoints_are_refused(tmp_path):
    interrupted(METHODS[2], tmp_path, 2)
    (folder,) = tmp_path.glob("round-*")
    state = folder / "state.json"
    text = state.read_text()
    state.write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        run(METHODS[2], resume=tmp_path)
    state.write_text(text)
    worker = folder / "worker-001.safetensors"
    worker.write_bytes(worker.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        run(METHODS[2], resume=tmp_path)
    state.write_text(json.dumps({**json.loads(text), "schema_version": 99}))
    with pytest.raises(CheckpointError, match="schema 99"):
        run(METHODS[2], resume=tmp_path)


def test_a_full_disk_leaves_the_older_checkpoints_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = DiLoCo(inner_steps=2)
    whole = run(method)
    save_file, room = checkpoint.save_file, [12]  # files: two checkpoints of five

    def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", save)
    with pytest.raises(OSError, match=r"cannot write .*worker-\d+.safetensors: .*No space left"):
        run(method, checkpoint_dir=tmp_path, checkpoint_every=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-000001", "round-000002"]
    monkeypatch.undo()
    assert run(method, resume=tmp_path).summary == whole.summary
