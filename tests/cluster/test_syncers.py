"""Methods with syncers between real processes: parity, and what kill -9 costs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Cluster, Event, Process

from gossamer import cli
from gossamer.cluster.certs import issue
from gossamer.cluster.join import join
from gossamer.cluster.syncer import SyncerProcess
from gossamer.config import load_recipe
from gossamer.deployment import job_of
from gossamer.errors import ConfigError
from gossamer.methods.decoupled_diloco import DecoupledDiLoCo
from gossamer.report.run_folder import RunFolder
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


ENDLESS = 100_000
LOOSE: dict[str, Any] = {
    "method": "decoupled_diloco",
    "hyperparameters": {"inner_steps": 4, "fragments": 2, "due_steps": 1},
    "workers": 3,
    "rounds": ENDLESS,
    "step_time_s": 0.03,
    "deadline_s": 5.0,
    "checkpoint_every": 0,
}


def newest(process: Process, kind: str) -> Event:
    process.wait(kind)
    return process.find(kind)[-1]


def goes_on(processes: Iterable[Process], rounds: int = 2) -> None:
    """Each passes so many more boundaries than it has."""
    for process in processes:
        process.wait("boundary", round=newest(process, "boundary")["round"] + rounds)


def has_merged(syncer: Process, learner: int, after: int) -> None:
    """In each fragment the learner is in a merge of a later version than `after`."""
    syncer.wait_until(
        f"merge with learner {learner}",
        lambda process: (
            all(
                row[learner] > after for e in process.find("durable")[-1:] for row in e["merged_in"]
            )
            and process.find("durable")
        ),
    )


@pytest.mark.parametrize("point", ["training", "sending:fragment"])
def test_a_learner_that_is_killed_holds_up_nobody_and_catches_up(
    cluster: Start, point: str
) -> None:
    run = cluster(**LOOSE)
    in_round = 2 if point == "training" else 0  # letters belong to no round
    run.start_all({1: [(point, in_round)]})
    run.workers[1].wait("held")
    syncer, others = run.syncers[0], run.others(1)
    run.workers[1].kill()
    goes_on(others)
    version = max(newest(syncer, "durable")["versions"])
    has_merged(syncer, 0, version)
    assert run.coordinator.wait("lost", worker=1)["cause"] == "crash"

    run.start(1)
    joined = run.workers[1].wait("joined")
    donor = run.workers[joined["donor"]]
    assert donor.wait("boundary", round=joined["round"])["digest"] == joined["digest"]
    # It reports, is asked, gives, and is merged: against what it has taken since.
    has_merged(syncer, 1, max(newest(syncer, "durable")["versions"]))
    goes_on(run.workers.values())


@pytest.mark.parametrize("point", ["saving", "sending:update"])
def test_a_syncer_that_is_killed_loses_nothing_merged_and_comes_back(
    cluster: Start, point: str
) -> None:
    """In the middle of its writing, or when what it wrote is about to be told."""
    run = cluster(**LOOSE)
    number = 4 if point == "saving" else 0
    for worker in range(3):
        run.start(worker)
    run.start_syncer(hold=[(point, number)])
    syncer = run.syncers[0]
    syncer.wait("held")
    syncer.kill()
    kept = newest(syncer, "durable")
    if point == "saving":
        assert list((run.folder / "syncer-000").glob(".merge-*"))
    goes_on(run.workers.values(), rounds=3)  # nobody waits for it
    assert run.coordinator.wait("lost", worker=3)["cause"] == "crash"
    told = [newest(process, "position")["versions"] for process in run.workers.values()]

    run.start_syncer()
    entered = run.syncers[0].wait("entered")
    assert entered == {**kept, **{name: entered[name] for name in ("event", "at")}}
    for versions in told:
        assert all(mine <= its for mine, its in zip(versions, entered["versions"], strict=True))
    for learner in range(3):
        has_merged(run.syncers[0], learner, max(entered["versions"]))
    for process in run.workers.values():
        process.wait_until(
            "update of the syncer that is back",
            lambda learner: min(newest(learner, "position")["versions"]) > max(entered["versions"]),
        )


def test_a_syncer_that_was_given_up_takes_its_place_again(cluster: Start) -> None:
    """Stopped for longer than its lease; it goes on from its disk, in the same process."""
    run = cluster(**{**LOOSE, "deadline_s": 1.5})
    run.start_all()
    syncer = run.syncers[0]
    has_merged(syncer, 0, 0)
    syncer.stop()
    run.coordinator.wait("lost", worker=3)
    goes_on(run.workers.values())
    syncer.resume()
    syncer.wait("out_of_sync")
    entered = syncer.wait("entered", count=2)
    has_merged(syncer, 1, max(entered["versions"]))


def test_the_run_ends_with_the_workers_and_a_finished_learner_is_not_waited_for(
    cluster: Start,
) -> None:
    given = {"inner_steps": 4, "fragments": 2, "quorum": 2, "due_steps": 1}
    run = cluster(method="decoupled_diloco", hyperparameters=given, workers=2, rounds=4)
    run.start(0)
    run.start(1, step_time_s=0.05)
    run.start_syncer()
    ends = run.finish()
    assert all(end["summary"]["rounds_completed"] == 4 for end in ends.values())
    summary = run.syncers[0].wait("end")["summary"]
    assert summary["merges"] >= 4
    assert summary["time_s"] == 0.0
    assert run.coordinator.wait("end")["status"]["phase"] == "ended"


RECIPE = """
[task]
model = "llama-nano"
eval_sequences = 4
probe_sequences = 1
[train]
workers = 2
rounds = 2
batch_size = 1
sequence_length = 16
[method]
name = "decoupled_diloco"
inner_steps = 4
fragments = 2
[run]
world = "cluster"
threads = 1
"""


def test_launch_starts_the_syncer_with_its_certificate_and_counts_what_it_sends(
    tmp_path: Path,
) -> None:
    (tmp_path / "my.toml").write_text(RECIPE)
    issue(tmp_path / "certs", 2, num_syncers=1)
    out = tmp_path / "run"
    arguments = ["launch", str(tmp_path / "my.toml"), "--out", str(out), "--json"]
    assert cli.run([*arguments, "--set", f"cluster.certificates={tmp_path / 'certs'}"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["bytes_by_kind"]) >= {"report", "pull", "fragment", "update"}
    merged, own = summary["records"]["merged_learners"], (out / "syncer-000" / "summary.json")
    told = json.loads(own.read_text())["records"]["merged_learners"]
    assert merged == told and told["count"] >= 2
    # What is sent by a syncer is nobody's time.
    assert 0 < summary["utilization"] <= 1 and summary["samples"] == 2 * 2 * 4 * 16
    assert [p.name for p in sorted((out / "syncer-000").glob("merge-*"))]


def test_what_needs_a_syncer_is_refused_where_there_can_be_none(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    method = DecoupledDiLoCo(inner_steps=4, fragments=1)
    with pytest.raises(ConfigError, match="has a syncer"):
        join("127.0.0.1:1", method=method, model=model)
    (tmp_path / "my.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "my.toml", [])
    folder = RunFolder.create(tmp_path / "run", recipe)
    folder.close()
    assert cli.run(["launch", "--resume", str(tmp_path / "run")]) == cli.USER_MISTAKE
    with pytest.raises(ConfigError, match="there is no syncer 1"):
        SyncerProcess(job_of(recipe), coordinator="127.0.0.1:1", folder=tmp_path, index=1)
