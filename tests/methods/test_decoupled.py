"""Decoupled DiLoCo: what it reduces to, what it counts, and that nobody waits for the dead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.measure.settings import Measure
from gossamer.methods import DecoupledDiLoCo, DiLoCo, Method
from gossamer.mixing.schedule import Schedule
from gossamer.sim.chaos import elastic
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults, Outage
from gossamer.sim.network import Network, WorkerLink
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.problems import TinyMLP
from gossamer.training.settings import Training

QUIET = Measure(every=0)
FAST = Network(bandwidth="10Gbit/s", latency="1ms")
UNEQUAL = Timing(step_time=1.0, speeds=(1, 1, 0.82, 0.82), jitter=0.1)


def run(method: Method, *, workers: int = 4, rounds: int = 5, **more: Any) -> SimulationResult:
    more.setdefault("training", Training(learning_rate=0.02, clip_norm=0))
    more.setdefault("network", FAST)
    task = TinyMLP(dtype=torch.float64)
    return simulate(method=method, task=task, workers=workers, rounds=rounds, measure=QUIET, **more)


def total(result: SimulationResult, name: str) -> float:
    cell = result.summary["records"].get(name, {"count": 0, "mean": 0.0})
    return float(cell["count"] * cell["mean"])


def mean(result: SimulationResult, name: str) -> float:
    return float(result.summary["records"][name]["mean"])


def check_conserved(result: SimulationResult, num_fragments: int) -> None:
    """Every token is, per fragment, in one merge, discarded, or not reported yet."""
    counted = sum(total(result, f"{kind}_tokens") for kind in ("merged", "discarded", "pending"))
    assert counted == result.summary["samples"] * num_fragments


def test_i12_with_one_fragment_and_no_delay_it_is_diloco() -> None:
    method = DecoupledDiLoCo(inner_steps=3, quorum=4, fragments=1, due_steps=0, merge="average")
    decoupled, diloco = run(method), run(DiLoCo(inner_steps=3))
    assert torch.equal(decoupled.parameters, diloco.parameters)
    assert float(diloco.parameters.std()) > 0.1
    assert mean(decoupled, "merged_learners") == 4


def test_a_learner_keeps_its_share_of_its_own() -> None:
    """One learner, one merge: Theta is halfway to the learner, who takes it by half."""

    def ended(rate: float, blend: float) -> torch.Tensor:
        method = DecoupledDiLoCo(inner_steps=3, fragments=1, due_steps=0, merge="average",
                                 outer_learning_rate=rate, outer_momentum=0.0)  # fmt: skip
        method = method.model_copy(update={"blend": blend})
        return run(method, workers=1, rounds=1).parameters

    middle, own = ended(0.5, 0.0), ended(1.0, 0.0)
    torch.testing.assert_close(ended(0.5, 0.5), (middle + own) / 2)
    assert float((middle - own).abs().max()) > 1e-3


@given(period=st.integers(1, 40), data=st.data())
def test_each_fragment_is_due_once_in_a_cycle(period: int, data: st.DataObject) -> None:
    schedule = Schedule(data.draw(st.integers(1, period)), period)
    start = data.draw(st.integers(0, 100))
    due = [schedule.due(step) for step in range(start + 1, start + 1 + period)]
    found = sorted(p for p in due if p is not None)
    if start >= 1:
        assert found == list(range(schedule.num_fragments))
    for step in range(1, 3 * period):
        p = schedule.due(step)
        if p is not None:
            assert schedule.steps_since(p, step) == 0
    if schedule.num_fragments == 1:
        assert [step for step in range(1, 3 * period + 1) if schedule.due(step) is not None] == [
            period,
            2 * period,
            3 * period,
        ]
    if schedule.num_fragments == period:
        assert None not in due


@pytest.mark.parametrize("quorum", [4, 1])
def test_in_steady_state_counters_are_h_minus_tau(quorum: int) -> None:
    """They are reset on receipt, tau steps after the merge; the tau steps are discarded."""
    method = DecoupledDiLoCo(inner_steps=24, quorum=quorum)
    result = run(method, rounds=10, timing=Timing(step_time=1.0))
    # The first merge of fragments 0..3 is after 24, 6, 12 and 18 steps; all later ones after 22.
    merges = result.summary["records"]["merged_steps"]["count"]
    assert total(result, "merged_steps") == 4 * (24 + 6 + 12 + 18) + (merges - 16) * 22
    assert result.summary["utilization"] == pytest.approx(1.0, abs=0.01)
    check_conserved(result, 4)
    # Discarded: tau steps of 16 samples for every update that was received.
    assert mean(result, "discarded_tokens") == 2 * 16


def test_unequal_learners_with_a_quorum_of_all_one_and_one_with_grace() -> None:
    method = DecoupledDiLoCo(inner_steps=24)
    all_, one, grace = (
        run(method.model_copy(update=change), timing=UNEQUAL)
        for change in ({"quorum": 4}, {"grace": 0.0}, {})
    )
    assert mean(all_, "merged_learners") == 4
    assert mean(one, "merged_learners") < 1.5
    assert mean(grace, "merged_learners") > 3.5
    assert one.summary["utilization"] == grace.summary["utilization"] == 1.0
    assert 0.8 < all_.summary["utilization"] < 0.95
    for result in (all_, one, grace):
        check_conserved(result, 4)


@pytest.mark.parametrize("syncers", [1, 3])
def test_shards_share_the_fragments(syncers: int) -> None:
    result = run(DecoupledDiLoCo(inner_steps=8, syncers=syncers), rounds=6)
    assert total(result, "merged_learners") == pytest.approx(4 * 24, abs=8)
    check_conserved(result, 4)
    senders = {e.sender for e in result.ledger.entries() if e.kind == "update"}
    assert senders == set(range(4, 4 + syncers))


def test_a_dead_learner_delays_no_merge() -> None:
    crash = Faults(crashes=(CrashAt(worker=3, start=40.0),))
    method, timing = DecoupledDiLoCo(inner_steps=24), Timing(step_time=1.0)
    whole, less = run(method, timing=timing), run(method, timing=timing, faults=crash)
    merges = [r.summary["records"]["merged_learners"]["count"] for r in (whole, less)]
    assert merges[0] == merges[1]
    assert less.summary["utilization"] == pytest.approx(1.0, abs=0.01)
    assert mean(less, "merged_learners") < mean(whole, "merged_learners") == 4


def test_learners_train_on_while_the_syncer_is_away_and_nothing_merged_is_lost() -> None:
    away = Faults(crashes=(CrashAt(worker=4, start=30.5, return_after=40.0),))
    method, timing = DecoupledDiLoCo(inner_steps=24), Timing(step_time=1.0)
    result = run(method, timing=timing, faults=away, rounds=8)
    assert result.summary["utilization"] == pytest.approx(1.0, abs=0.01)
    assert result.summary["time_s"] == pytest.approx(192, abs=1)
    check_conserved(result, 4)
    after = run(method, timing=timing, rounds=8).summary["records"]["merged_learners"]["count"]
    assert result.summary["records"]["merged_learners"]["count"] == pytest.approx(after - 7, abs=1)


def test_a_lost_update_is_repaired_and_no_token_is_merged_twice() -> None:
    cut = Faults(outages=(Outage(worker=0, start=20.0, duration=45.0),))
    result = run(DecoupledDiLoCo(inner_steps=24), timing=Timing(step_time=1.0), faults=cut)
    counted = total(result, "merged_tokens") + total(result, "discarded_tokens")
    pending, whole = total(result, "pending_tokens"), result.summary["samples"] * 4
    assert counted <= whole <= counted + pending
    # At the end one merge is on its way, of the H - tau steps of each learner: its tokens are
    # merged, and pending for those who have not heard of it.
    assert counted + pending - whole in (0, 4 * 22 * 16)
    assert result.summary["utilization"] == pytest.approx(1.0, abs=0.01)


def test_an_answer_that_is_late_is_no_answer_to_the_next_pull() -> None:
    """Learner 0's come four steps after their pull: when that is over, and before the next."""
    far = Network(bandwidth="10Gbit/s", workers=(WorkerLink(worker=0, latency=2.0),))
    method = DecoupledDiLoCo(inner_steps=24, quorum=4, waits=False)
    result = run(method, timing=Timing(step_time=1.0), network=far)
    assert mean(result, "merged_learners") == 3
    check_conserved(result, 4)


def test_who_returns_has_a_donor_s_state_and_counts_from_zero() -> None:
    crash = Faults(crashes=(CrashAt(worker=1, start=30.0, return_after=20.0),))
    result = run(DecoupledDiLoCo(inner_steps=24), timing=Timing(step_time=1.0), faults=crash,
                 rounds=6)  # fmt: skip
    assert 1 in result.workers
    counted = total(result, "merged_tokens") + total(result, "discarded_tokens")
    assert counted <= result.summary["samples"] * 4


faults = st.builds(
    Faults,
    crashes=st.lists(
        st.builds(CrashAt, worker=st.integers(1, 4), start=st.floats(1, 60),
                  return_after=st.sampled_from([0.5, 7.0, 40.0])),
        max_size=3,
    ),
    outages=st.lists(
        st.builds(Outage, worker=st.integers(0, 4), start=st.floats(0, 60),
                  duration=st.floats(0.1, 30)),
        max_size=3,
    ),
)  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(faults=faults, seed=st.integers(0, 1000), quorum=st.sampled_from([1, 2, 4]))
def test_under_any_faults_no_token_counts_twice_and_nothing_hangs(
    faults: Faults, seed: int, quorum: int
) -> None:
    result = run(
        DecoupledDiLoCo(inner_steps=8, quorum=quorum),
        faults=faults,
        seed=seed,
        timing=Timing(step_time=1.0, speeds=(1, 0.9, 1.1, 0.7), jitter=0.2),
        network=Network(bandwidth="1Mbit/s", latency="50ms", failure_probability=0.05,
                        failure_unit="transfer"),
    )  # fmt: skip
    counted = total(result, "merged_tokens") + total(result, "discarded_tokens")
    assert counted <= result.summary["samples"] * 4
    assert bool(torch.isfinite(result.parameters[list(result.workers)]).all())
    if not faults.crashes:
        # What is pending may be merged already, where the update is still on its way.
        whole = result.summary["samples"] * 4
        assert counted + total(result, "pending_tokens") >= whole


def test_the_same_run_has_the_same_trace() -> None:
    method = DecoupledDiLoCo(inner_steps=8)
    runs = [run(method, timing=UNEQUAL, faults=Faults(chaos=elastic(3e6))) for _ in range(2)]
    assert runs[0].summary["trace_hash"] == runs[1].summary["trace_hash"]
    assert torch.equal(runs[0].parameters, runs[1].parameters)


def test_bytes_are_those_of_the_documented_cost() -> None:
    method = DecoupledDiLoCo(inner_steps=24, quorum=4, codec="int4", codec_down="bf16")
    result = run(method, rounds=4, timing=Timing(step_time=1.0))
    kinds, layout = result.summary["bytes_by_kind"], result.summary["parameters"]
    assert kinds["report"] == 4 * 24 * 4 * 9
    merges = int(result.summary["records"]["merged_learners"]["count"])
    assert kinds["pull"] == merges * 4 * 9
    cycles = merges / 4
    # Notes are 3 numbers of 8 bytes; scales of int4 2 bytes for each of 4 fragments.
    assert kinds["update"] == pytest.approx(4 * cycles * (2 * layout + 4 * 24), rel=0.1)
    assert kinds["fragment"] == pytest.approx(4 * cycles * (layout / 2 + 4 * 26), rel=0.1)


@pytest.mark.parametrize("codec", ["bf16", "int4", "int1", "e3m0"])
def test_every_codec_runs_and_all_hold_the_same_bits(codec: str) -> None:
    method = DecoupledDiLoCo(inner_steps=4, quorum=4, fragments=1, due_steps=0, codec=codec,
                             codec_down="bf16")  # fmt: skip
    result = run(method, rounds=3)
    assert float((result.parameters - result.parameters[0]).abs().max()) == 0.0


def test_it_runs_without_numerics() -> None:
    result = run(DecoupledDiLoCo(inner_steps=8, codec="int4"), numerics="none", timing=UNEQUAL)
    assert result.summary["utilization"] == 1.0
    assert mean(result, "merged_learners") > 3


def test_a_learner_that_diverges_sends_nothing_more() -> None:
    training = Training(learning_rate=0.02, clip_norm=0, optimizer="sgd")
    result = run(DecoupledDiLoCo(inner_steps=8), training=training)
    assert bool(torch.isfinite(result.parameters).all())


def test_settings_that_do_not_fit_are_refused() -> None:
    for wrong, words in (
        ({"quorum": 5}, "quorum: at most 4"),
        ({"syncers": 5}, "syncers: at most 4"),
        ({"due_steps": 8}, "due_steps: at most 7"),
        ({"fragments": 9}, "fragments"),
        ({"codec": "int5"}, "unknown codec"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(DecoupledDiLoCo(inner_steps=8, **wrong))
    with pytest.raises(ConfigError, match="cannot be saved"):
        run(DecoupledDiLoCo(), checkpoint_every=1, checkpoint_dir="nowhere")
