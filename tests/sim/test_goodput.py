"""Goodput of the published table's cells, and what a site's line carries, from the ledger."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gossamer import cli
from gossamer.measure.settings import Measure
from gossamer.methods import DataParallel, DecoupledDiLoCo, Method
from gossamer.sim.chaos import Chaos
from gossamer.sim.compute import Timing
from gossamer.sim.faults import Faults
from gossamer.sim.goodput import CHIPS, PUBLISHED, Cell, _Shapes, measure, published
from gossamer.sim.network import Network
from gossamer.sim.simulate import simulate

PARAMETERS = 5.04e9


def test_the_closed_form_with_the_fitted_times_is_near_every_cell() -> None:
    """The fit, before any run: no elastic or Decoupled cell is more than 3.5 points off."""
    for learners in (1, 2, 4, 8, 16):
        for chips in CHIPS:
            expected = 100 * Chaos(chips=chips).expected_goodput(learners)
            assert expected == pytest.approx(PUBLISHED[learners][chips], abs=3.5)


@pytest.mark.parametrize("chips", CHIPS)
@pytest.mark.parametrize("learners", [0, 1])
def test_data_parallel_rows(learners: int, chips: float) -> None:
    cell = Cell(chips, learners)
    assert 100 * measure(cell).goodput == pytest.approx(published(cell), abs=4)


def test_the_headline_cell_by_the_real_loops() -> None:
    """88 % at 1.2M chips and 8 learners, against 58 and 27 for data parallel."""
    found = measure(Cell(1.2e6, 8, learner_steps=1536))
    assert 100 * found.goodput == pytest.approx(88, abs=4)
    assert found.merged_learners is not None and 4 < found.merged_learners <= 8


def test_learners_lose_nothing_but_their_own_stops() -> None:
    """Goodput is that of the stops alone: no learner waits for another, or for the syncer."""
    faults = Faults(chaos=Chaos(chips=2.4e6))
    timing, network = Timing(step_time=10.0), Network(bandwidth="10Gbit/s")
    kept: dict[str, Any] = {
        "workers": 4,
        "rounds": 4,
        "numerics": "none",
        "measure": Measure(every=0),
    }
    method = DecoupledDiLoCo(inner_steps=24)
    result = simulate(method=method, task=_Shapes(), timing=timing, network=network,
                      faults=faults, **kept)  # fmt: skip
    assert result.summary["train_time_s"] == pytest.approx(4 * 24 * 10, abs=1e-6)
    assert result.summary["blocked_time_s"] > 0  # the stops
    quiet = simulate(method=method, task=_Shapes(), timing=timing, network=network, **kept)
    assert quiet.summary["utilization"] == 1.0


def bits_per_second(method: Method, kind: str, timing: Timing) -> float:
    """What each site sends for one purpose, per second, over whole cycles."""
    result = simulate(method=method, task=_Shapes(), workers=8, rounds=4, numerics="none",
                      measure=Measure(every=0), network=Network(bandwidth="1Tbit/s"),
                      timing=timing)  # fmt: skip
    sent = sum(result.ledger.total(kind=kind, sender=worker) for worker in range(8))
    return 8 * sent / 8 / float(result.summary["time_s"])


def test_bandwidth_per_site_from_the_ledger() -> None:
    """A 5.04e9-parameter model in steps of 1 s, eight sites, P = H = 24, int4: 0.84 Gbit/s."""
    timing = Timing(step_time=1.0, parameters=PARAMETERS)
    decoupled = bits_per_second(DecoupledDiLoCo(inner_steps=24, codec="int4"), "fragment",
                                timing=timing)  # fmt: skip
    # A pull for each step but the first of a run; scales add 0.4 % to 4 bits a value.
    assert decoupled / 1e9 == pytest.approx(0.84, rel=0.025)
    plain = Timing(step_time=1.0, parameters=PARAMETERS, payload_dtype="bf16")
    bf16 = bits_per_second(DecoupledDiLoCo(inner_steps=24), "fragment", timing=plain)
    assert bf16 / 1e9 == pytest.approx(3.36, rel=0.02)
    # Data parallel: 1.75 P values of 16 bits a step. A line that hides them behind two thirds of
    # each step needs 212 Gbit/s; at 95.6 % utilisation, 198.
    steps = simulate(method=DataParallel(inner_steps=2), task=_Shapes(), workers=8, rounds=2,
                     numerics="none", measure=Measure(every=0), timing=plain,
                     network=Network(bandwidth="1Tbit/s"))  # fmt: skip
    gbit = 8 * steps.ledger.total(kind="gradient", sender=0) / 4 / 1e9
    assert gbit == pytest.approx(141.1, rel=0.002)
    allowed_s = 1 / 0.956 - 1 / 3
    assert gbit / allowed_s == pytest.approx(198, rel=0.01)
    assert gbit / allowed_s / (decoupled / 1e9) == pytest.approx(235.7, rel=0.03)


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "goodput", "--chips", "1.2M", "--learners", "8", "--learner-steps", "192"]
    assert cli.run([*arguments, "--jobs", "1", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    cells = content["cells"]
    assert [cell["published_percent"] for cell in cells] == [27, 58, 88]
    assert all(0 < cell["goodput_percent"] <= 100 for cell in cells)
    assert cli.run([*arguments, "--jobs", "1"]) == 0
    assert "Decoupled, 8 learners" in capsys.readouterr().out
    assert cli.run(["plan", "goodput", "--chips", "many"]) == 2
    assert "--chips" in capsys.readouterr().err
