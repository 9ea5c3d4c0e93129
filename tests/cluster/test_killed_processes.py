"""What failures cost: processes are killed and stopped at named points of a round.

Runs have far more rounds than a test looks at, and are ended when it has seen enough. Boundaries
tell a digest of parameters and method state, so that who agrees with whom is seen at every round.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from processes import Cluster, Process

from gossamer.cluster.checkpoint import WorkerCheckpoints
from gossamer.cluster.messages import LEAD_ROUNDS
from gossamer.comm.donation import digest
from gossamer.sim.simulate import simulate

DEADLINE_S = 5.0
SLACK_S = 5.0  # for a busy machine; what is told at once takes milliseconds on a quiet one
ENDLESS = 100_000
RUN: dict[str, Any] = {
    "hyperparameters": {"inner_steps": 4},
    "rounds": ENDLESS,
    "step_time_s": 0.03,
    "deadline_s": DEADLINE_S,
    "checkpoint_every": 0,
}

Start = Callable[..., Cluster]


def newest_round(process: Process) -> int:
    return max((event["round"] for event in process.find("boundary")), default=-1)


def check_goes_on(processes: Iterable[Process], after_round: int, since_s: float) -> None:
    """All of them finish the round that the failure fell into, and another, within the deadline."""
    for process in processes:
        done = process.wait("boundary", round=after_round + 1)
        assert done["at"] - since_s < DEADLINE_S + SLACK_S, process.name
        process.wait("boundary", round=after_round + 2)


def check_joins(run: Cluster, worker: int) -> int:
    """It goes on from what its donor had; returns the round."""
    joiner = run.workers[worker]
    joined = joiner.wait("joined")
    donor, round_index = run.workers[joined["donor"]], joined["round"]
    given = donor.wait("boundary", round=round_index)
    assert joined["digest"] == given["digest"]
    position = ("steps", "learning_rate")
    mine = joiner.find("position", round=round_index)[0]
    theirs = donor.find("position", round=round_index)[0]
    assert [mine[name] for name in position] == [theirs[name] for name in position]
    joiner.wait("boundary", round=round_index + 2)
    return int(round_index)


def check_agreement(processes: Iterable[Process], first: int, last: int) -> None:
    """They have equal states at these boundaries."""
    processes = list(processes)
    for round_index in range(first, last + 1):
        digests = {p.wait("boundary", round=round_index)["digest"] for p in processes}
        assert len(digests) == 1, round_index


def lost_exchanges(processes: Iterable[Process]) -> float:
    newest = [process.find("boundary")[-1]["records"] for process in processes]
    return sum(records.get("failed_exchanges", {"count": 0})["count"] for records in newest)


KILLS = [
    ("diloco", 3, "training"),
    ("diloco", 3, "send:outer"),
    ("diloco", 3, "sending:outer"),
    ("diloco", 3, "received:outer"),
    ("diloco", 3, "saving"),
    ("LocalM1M2", 4, "training"),
    ("LocalM1M2", 4, "sending:mix1"),
    ("LocalM1M2", 4, "send:mix2"),
    ("LocalM1M2", 4, "sending:mix2"),
    ("LocalM1M2", 4, "received:mix2"),
    ("LocalM1M2", 4, "saving"),
    ("GlobalM1LocalM2", 4, "sending:mix1"),
    ("GlobalM1LocalM2", 4, "received:mix1"),
    ("gasloc", 4, "training"),
    ("gasloc", 4, "sending:mix"),
]


@pytest.mark.parametrize(("method", "num_workers", "point"), KILLS)
def test_a_worker_that_is_killed_costs_the_others_next_to_nothing_and_comes_back(
    cluster: Start, method: str, num_workers: int, point: str
) -> None:
    saves = {"checkpoint_every": 1, "saves": True} if point == "saving" else {}
    run = cluster(**{**RUN, "method": method, "workers": num_workers, **saves})
    victim, died_in = 1, 2
    run.start_all({victim: [(point, died_in)]})
    run.workers[victim].wait("held", point=point)
    others = run.others(victim)
    run.workers[victim].kill()
    since_s = time.monotonic()
    check_goes_on(others, died_in, since_s)
    assert run.coordinator.wait("lost", worker=victim)["cause"] == "crash"

    run.start(victim)
    back_in = check_joins(run, victim)
    if method == "diloco":
        check_agreement(others, 1, died_in + 2)
        check_agreement(run.workers.values(), back_in, back_in + 2)
        retries = [p.find("boundary")[-1]["records"].get("retries", {"count": 0}) for p in others]
        assert all(r["count"] <= LEAD_ROUNDS + 1 for r in retries)
    else:
        # Rounds that were planned with it cost its partner's exchanges: two mixes in each, until
        # the news has come; a round may have begun on the way.
        assert lost_exchanges(others) <= 2 * (LEAD_ROUNDS + 2)


@pytest.mark.parametrize("policy", ["donor", "keep", "reset"])
def test_a_worker_that_comes_back_has_the_moments_that_were_asked_for(
    cluster: Start, policy: str
) -> None:
    """The donor's, those of its own last checkpoint, or none."""
    options = {**RUN, "rejoin_moments": policy, "checkpoint_every": 1, "saves": True}
    run = cluster(**options, method="diloco", workers=2)
    run.start_all({1: [("training", 3)]})
    run.workers[1].wait("held")
    (own,) = run.workers[1].find("position", round=3)
    run.workers[1].kill()
    run.start(1)
    back_in = check_joins(run, 1)
    mine = run.workers[1].find("position", round=back_in)[0]["moments"]
    donors = run.workers[0].find("position", round=back_in)[0]["moments"]
    assert mine == {"donor": donors, "keep": own["moments"], "reset": digest([])}[policy]
    assert len({donors, own["moments"], digest([])}) == 3


def test_a_run_that_was_killed_goes_on_with_fewer_workers(cluster: Start) -> None:
    """What the third had is left behind; the two agree, and go on where they were."""
    options = {**RUN, "rounds": 7, "step_time_s": 0.0, "checkpoint_every": 1, "saves": True}
    run = cluster(**options, method="diloco", workers=3)
    run.start_all({worker: [("training", 4)] for worker in range(3)})
    for process in run.workers.values():
        process.wait("held")
    saved = run.workers[0].wait("boundary", round=4)["digest"]
    for process in (*run.workers.values(), run.coordinator):
        process.kill()
    run_id = WorkerCheckpoints(run.folder / "worker-000").saved_run_id()
    (run.folder / "run.sqlite").rename(run.folder / "old.sqlite")
    for file in run.folder.glob("run.sqlite-*"):
        file.unlink()
    fewer = run.with_workers(2, run_id=run_id)
    fewer.start_all()
    for process in fewer.workers.values():
        assert process.wait("boundary", round=4)["digest"] == saved
    ends = fewer.finish()
    assert len({end["summary"]["digest"] for end in ends.values()}) == 1
    assert all(end["summary"]["rounds_completed"] == 7 for end in ends.values())


def test_a_worker_that_is_back_at_once_does_not_hold_up_the_rounds_planned_with_it(
    cluster: Start,
) -> None:
    run = cluster(**RUN, method="diloco", workers=3)
    run.start_all({worker: [("training", 2)] for worker in range(3)})
    for process in run.workers.values():
        process.wait("held")
    others = run.others(1)
    run.workers[1].kill()
    run.start(1)
    run.coordinator.wait("entry", worker=1, start="donor")
    since_s = time.monotonic()
    for process in others:
        process.go()
    check_goes_on(others, 2, since_s)
    assert all(p.wait("boundary", round=4)["at"] - since_s < DEADLINE_S for p in others)
    back_in = check_joins(run, 1)
    check_agreement(others, 1, back_in)


def test_a_worker_that_misses_a_vote_and_is_left_behind_gives_up_its_place_and_comes_back(
    cluster: Start,
) -> None:
    """Worker 2's ballot never reaches worker 1, who cannot know that the others have agreed."""
    run = cluster(**RUN, method="diloco", workers=3)
    ballot = {"kind": "outer", "phase": 2, "round_index": 2, "receiver": 1}
    for worker in range(3):
        run.start(worker, **({"mute": ballot} if worker == 2 else {}))
    missed = run.workers[1].wait("out_of_sync")
    assert newest_round(run.workers[1]) == 2
    assert run.coordinator.wait("lost", worker=1)["cause"] == "out_of_sync"
    check_goes_on(run.others(1), 3, missed["at"])
    back_in = check_joins(run, 1)
    check_agreement(run.workers.values(), back_in, back_in + 2)


def test_a_donor_that_has_passed_the_joiners_round_already_says_so_at_once(cluster: Start) -> None:
    """News is late: the coordinator has not heard how far they are, and lets one in at a round that
    they do already. They would wait for it there, and it for them. The members of their round
    change, of which one may hear in the middle of a vote: it is left behind, and comes back too.
    """
    run = cluster(**RUN, method="diloco", workers=3)
    run.start_all({1: [("training", 6)]}, quiet=True)
    run.workers[1].wait("held")  # not in a vote, of which one of the others might have heard alone
    run.workers[1].kill()
    others = run.others(1)
    run.start(1)
    since_s = run.coordinator.wait("entry", worker=1, start="donor")["at"]
    for process in others:
        process.go()
    died_in = max(newest_round(p) for p in others)
    for process in others:
        process.wait_until("later round", lambda p: newest_round(p) > died_in)
        at_s = min(e["at"] for e in process.find("boundary") if e["round"] > died_in)
        assert at_s - since_s < DEADLINE_S + SLACK_S, process.name
    check_joins(run, 1)
    first = max(newest_round(p) for p in run.workers.values()) + 1
    check_agreement(run.workers.values(), first, first + 2)


def test_two_workers_that_are_killed_at_once_come_back(cluster: Start) -> None:
    run = cluster(**RUN, method="diloco", workers=4)
    run.start_all({worker: [("sending:outer", 2)] for worker in (1, 3)})
    for worker in (1, 3):
        run.workers[worker].wait("held")
    others = run.others(1, 3)
    for worker in (1, 3):
        run.workers[worker].kill()
    check_goes_on(others, 2, time.monotonic())
    for worker in (1, 3):
        run.start(worker)
    back_in = max(check_joins(run, worker) for worker in (1, 3))
    check_agreement(others, 1, back_in)
    check_agreement(run.workers.values(), back_in, back_in + 2)


@pytest.mark.parametrize("method", ["diloco", "LocalM1M2"])
def test_a_worker_that_stands_still_for_longer_than_the_deadline_is_given_up_and_comes_back(
    cluster: Start, method: str
) -> None:
    run = cluster(**{**RUN, "deadline_s": 3.0}, method=method, workers=4)
    run.start_all({1: [("training", 3)]})
    victim = run.workers[1]
    victim.wait("held")  # not in a vote, of which one of the others might have heard alone
    victim.stop()
    since_s = time.monotonic()
    others = run.others(1)
    stopped_in = newest_round(victim)
    check_goes_on(others, stopped_in, since_s)
    assert run.coordinator.wait("lost", worker=1)["cause"] == "hang"

    victim.go()
    victim.resume()
    victim.wait("out_of_sync")
    back_in = check_joins(run, 1)
    assert back_in > stopped_in
    if method == "diloco":
        check_agreement(run.workers.values(), back_in, back_in + 2)
    else:
        # two mixes a round, until the news has come; a round may have begun on the way
        assert lost_exchanges(others) <= 2 * (LEAD_ROUNDS + 2)


@pytest.mark.parametrize("method", ["diloco", "LocalM1M2", "GlobalM1LocalM2"])
def test_a_worker_that_stands_still_for_a_moment_delays_the_others_and_no_more(
    cluster: Start, method: str
) -> None:
    run = cluster(**{**RUN, "deadline_s": 20.0}, method=method, workers=4)
    run.start_all()
    victim = run.workers[1]
    for turn in range(3):
        victim.wait("boundary", round=newest_round(victim) + 1 + turn % 2)
        victim.stop_for(1.0)
    last = newest_round(victim) + 2
    for process in run.workers.values():
        records = process.wait("boundary", round=last)
        assert records["failed_transfers"] == 0
        assert not set(records["records"]) & {"failed_exchanges", "left_out", "retries"}
        assert not process.find("lost") and not process.find("out_of_sync")
    assert not run.coordinator.find("lost")


def test_nobody_stops_when_the_coordinator_dies_and_its_return_is_noticed(cluster: Start) -> None:
    few = {"min_workers": 3, "start_timeout": 0.0}
    run = cluster(**RUN, method="diloco", workers=4, coordinator_settings=few)
    for worker in range(3):
        run.start(worker)
    run.workers[0].wait("boundary", round=2)
    run.coordinator.kill()
    died_in = max(newest_round(p) for p in run.workers.values())
    for process in run.workers.values():
        process.wait("boundary", round=died_in + 5)
        assert process.find("boundary")[-1]["failed_transfers"] == 0
    run.start(3)  # finds nobody there, and waits
    run.start_coordinator()
    back_in = check_joins(run, 3)
    check_agreement(run.workers.values(), back_in, back_in + 2)
    for worker in range(3):
        assert not run.workers[worker].find("out_of_sync")


def test_a_worker_that_dies_while_the_coordinator_is_away_is_missed_on_its_return(
    cluster: Start,
) -> None:
    run = cluster(**{**RUN, "deadline_s": 3.0}, method="LocalM1M2", workers=4)
    run.start_all()
    run.workers[0].wait("boundary", round=2)
    run.coordinator.kill()
    run.workers[2].kill()
    others = run.others(2)
    died_in = max(newest_round(p) for p in others)
    for process in others:
        process.wait("boundary", round=died_in + 2)  # its partners wait in vain, and go on
    run.start_coordinator()
    run.coordinator.wait("lost", worker=2)
    run.start(2)
    check_joins(run, 2)


def test_eight_workers_that_join_at_once_are_spread_over_the_donors(cluster: Start) -> None:
    few = {"min_workers": 4, "start_timeout": 0.0, "joiners_per_donor": 2}
    run = cluster(
        **{**RUN, "step_time_s": 0.15}, method="diloco", workers=12, coordinator_settings=few
    )
    for worker in range(4):
        run.start(worker)
    run.workers[0].wait("boundary", round=1)
    for worker in range(4, 12):
        run.start(worker)
    joined = [run.workers[worker].wait("joined") for worker in range(4, 12)]
    back_in = max(check_joins(run, worker) for worker in range(4, 12))
    check_agreement(run.workers.values(), back_in, back_in + 2)
    shared = Counter((event["donor"], event["round"]) for event in joined)
    assert max(shared.values()) <= 2
    assert len({event["donor"] for event in joined}) >= 4


def test_a_joiner_whose_donor_dies_in_the_middle_of_the_transfer_gets_another(
    cluster: Start,
) -> None:
    run = cluster(**RUN, method="diloco", workers=4)
    holds = {worker: [("sending:join", None)] for worker in (0, 2, 3)}
    run.start_all({**holds, 1: [("training", 2)]})
    run.workers[1].wait("held")
    run.workers[1].kill()
    others = run.others(1)
    joiner = run.start(1)
    entry = run.coordinator.wait("entry", worker=1, start="donor")
    donor = run.workers[entry["donor"]]
    donor.wait("held", point="sending:join")
    donor.kill()
    second = run.coordinator.wait("entry", worker=1, start="donor", attempt=entry["attempt"] + 1)
    assert second["donor"] != entry["donor"]
    run.workers[second["donor"]].wait("held", point="sending:join")
    run.workers[second["donor"]].go()
    back_in = check_joins(run, 1)
    alive = [process for process in (*others, joiner) if process is not donor]
    check_agreement(alive, back_in, back_in + 2)


def test_a_worker_whose_loss_is_not_finite_leaves_and_says_why(cluster: Start) -> None:
    run = cluster(**RUN, method="diloco", workers=3)
    for worker in range(3):
        run.start(worker, **({"nan_step": 10} if worker == 2 else {}))
    error = run.workers[2].wait("error")
    assert error["type"] == "NonFiniteError"
    lost = run.coordinator.wait("lost", worker=2)
    assert lost["cause"] == "error" and "not finite" in lost["reason"]
    check_goes_on(run.others(2), 2, error["at"])
    check_agreement(run.others(2), 1, 4)


@pytest.mark.parametrize("method", ["diloco", "LocalM1M2", "data_parallel", "gasloc"])
def test_a_run_that_was_killed_goes_on_from_checkpoints_bit_for_bit(
    cluster: Start, method: str
) -> None:
    options = {**RUN, "rounds": 8, "step_time_s": 0.0, "checkpoint_every": 1, "saves": True}
    run = cluster(**options, method=method, workers=2)
    run.start_all({0: [("saving", 4)]})
    run.workers[0].wait("held", point="saving")
    saved = sorted(path.name for path in (run.folder / "worker-000").glob("round-*"))
    assert saved == ["round-000001", "round-000002", "round-000003"]
    for process in (*run.workers.values(), run.coordinator):
        process.kill()
    run.start_coordinator()
    run.start_all()
    job = run.job
    whole = simulate(method=job.method, task=job.task, training=job.training, seed=job.seed)
    for worker, end in run.finish().items():
        entry = run.coordinator.find("entry", worker=worker, start="checkpoint")
        assert entry and entry[0]["round"] == 3
        data = bytearray.fromhex(end["parameters"])
        parameters = torch.frombuffer(data, dtype=torch.float32)
        assert torch.equal(parameters, whole.parameters[worker])
