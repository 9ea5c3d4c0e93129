"""GASLoC against its update with matrices, what it reduces to, its gossip rates, and its cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gossamer.comm.context import Context, Round
from gossamer.comm.news import (
    LENGTHENING,
    NOTHING,
    News,
    Row,
    round_aim,
    rounds_to_rest,
    steps_by_speed,
    steps_by_time,
)
from gossamer.errors import ConfigError
from gossamer.measure.settings import Measure
from gossamer.methods import DSGD, DiLoCo, FactoredGossip, GASLoC, LocalSGD, Method
from gossamer.mixing.consensus import Form, consensus_rate, optimal_choice
from gossamer.mixing.topologies import TOPOLOGIES
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.testing import run_workers
from gossamer.training.layout import ParameterLayout
from gossamer.training.problems import Quadratic, TinyMLP, Vector
from gossamer.training.settings import Training

LR = 0.1
SGD = Training(optimizer="sgd", learning_rate=LR, schedule="constant", clip_norm=0, weight_decay=0)
ADAMW = Training(learning_rate=0.02, clip_norm=0)
BOWL = Quadratic(12, 9, noise=0.5, heterogeneity=1.0, condition=4.0, dtype=torch.float64)
MLP = TinyMLP(dtype=torch.float64)
FORMS: list[Form] = ["A", "B"]


def run(method: Method, **given_: Any) -> SimulationResult:
    given_.setdefault("task", MLP)
    given_.setdefault("training", ADAMW)
    given_.setdefault("workers", 8)
    given_.setdefault("rounds", 8)
    given_.setdefault("measure", Measure(every=0))
    return simulate(method=method, **given_)


def distance(a: SimulationResult, b: SimulationResult) -> float:
    return float((a.parameters - b.parameters).abs().max())


# -------------------------------------------------------------------------------------- the update


def by_matrices(method: GASLoC, *, workers: int, rounds: int) -> np.ndarray:
    """The update as it is written, with stacked rows, Lambda and closed-form gradients."""
    theta = np.zeros((workers, BOWL.num_parameters))
    curvature = BOWL.curvature.numpy()
    previous = theta.copy()
    for t in range(rounds):
        end = theta.copy()
        for step in range(t * method.inner_steps, (t + 1) * method.inner_steps):
            batches = [BOWL.train_batch(w, step) for w in range(workers)]
            centres, noise = (np.stack([b[k].numpy() for b in batches]) for k in (0, 1))
            end = end - LR * (curvature * (end - centres) + noise)
        graph = method.graph(seed=0, round_index=t, members=tuple(range(workers)))
        laplacian = graph.laplacian()
        u = theta + method.eta * (end - theta)
        if method.form == "A":
            theta = u - method.alpha * laplacian @ u + method.gamma * (u - previous)
            previous = u
        else:
            m = u - method.alpha * laplacian @ u
            theta = m + method.gamma * (m - previous)
            previous = m
    return theta


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("topology", sorted(set(TOPOLOGIES) - {"edges"}))
def test_the_update_on_every_topology(topology: str, form: Form) -> None:
    method = GASLoC(
        inner_steps=3, topology=topology, form=form, eta=0.8, alpha=0.9, gamma=0.4,
        allow_unstable=True,
    )  # fmt: skip
    result = run(method, task=BOWL, training=SGD, workers=9, rounds=7).parameters.numpy()
    expected = by_matrices(method, workers=9, rounds=7)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-13)
    assert np.abs(expected - expected.mean(0)).max() > 1e-3


def test_an_edge_list_and_other_weights() -> None:
    edges = {"name": "edges", "pairs": [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2]]}
    method = GASLoC(inner_steps=2, topology=edges, weights="laplacian", alpha=0.2, gamma=0.3)
    result = run(method, task=BOWL, training=SGD, workers=4, rounds=7).parameters.numpy()
    expected = by_matrices(method, workers=4, rounds=7)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-13)


# ------------------------------------------------------------------------------- what it reduces to


def test_i8_form_b_on_the_complete_graph_is_diloco_for_any_loss() -> None:
    diloco = run(DiLoCo(inner_steps=3, outer_learning_rate=0.7, outer_momentum=0.9))
    both = [
        run(GASLoC(inner_steps=3, topology="complete", form=form, eta=0.7, gamma=0.9))
        for form in FORMS
    ]
    assert distance(both[1], diloco) < 1e-14
    # form A: not per worker, and on this loss not even in the mean
    assert distance(both[0], diloco) > 1e-3
    assert float((both[0].parameters.mean(0) - diloco.parameters[0]).abs().max()) > 1e-6


def test_i8_form_a_is_diloco_in_the_mean_for_a_common_hessian() -> None:
    given_ = {"task": BOWL, "training": SGD, "workers": 9}
    one = run(GASLoC(inner_steps=3, topology="complete", eta=0.7, gamma=0.9), **given_)
    two = run(DiLoCo(inner_steps=3, outer_learning_rate=0.7, outer_momentum=0.9), **given_)
    assert float((one.parameters.mean(0) - two.parameters[0]).abs().max()) < 1e-14
    assert float((one.parameters[0] - two.parameters[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_i9_one_worker_has_outer_nesterov(form: Form) -> None:
    one = run(GASLoC(inner_steps=3, form=form, eta=0.7, gamma=0.9), workers=1, rounds=20)
    two = run(DiLoCo(inner_steps=3), workers=1, rounds=20)
    assert distance(one, two) < 2e-14
    assert one.summary["bytes_sent_total"] == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("topology", ["ring", "random_pairs", "one_peer_exponential"])
def test_i10_without_momentum_and_with_one_step_it_is_adapt_then_combine(
    topology: str, form: Form
) -> None:
    given_ = {"training": SGD, "rounds": 12}
    gasloc = run(GASLoC(inner_steps=1, topology=topology, form=form, eta=1, gamma=0), **given_)
    dsgd = run(DSGD(inner_steps=1, topology=topology, order="adapt_then_combine"), **given_)
    assert distance(gasloc, dsgd) < 1e-15
    assert float(gasloc.parameters.std(0).max()) > 1e-4


def test_i10_without_momentum_on_the_complete_graph_it_is_local_sgd() -> None:
    gasloc = run(GASLoC(inner_steps=4, topology="complete", eta=1, gamma=0))
    assert distance(gasloc, run(LocalSGD(inner_steps=4))) < 1e-14


@pytest.mark.parametrize("form", FORMS)
def test_i11_without_momentum_it_is_factored_gossip_with_one_matching(form: Form) -> None:
    gasloc = run(GASLoC(inner_steps=3, form=form, eta=0.6, gamma=0), rounds=12)
    gossip = FactoredGossip(
        inner_steps=3, mix1="pair", mix2="pair", matchings="shared",
        outer_learning_rate=0.6, outer_momentum=0,
    )  # fmt: skip
    assert distance(gasloc, run(gossip, rounds=12)) < 1e-14


# --------------------------------------------------------------------------------- gossip by itself


class Scattered:
    """Each worker is thrown somewhere by its first step, and there is no gradient afterwards.

    Opposite workers are thrown opposite ways, so that the mean stays 0 and digits are not lost
    to it while the disagreement shrinks by many orders of magnitude.
    """

    def __init__(self, num_workers: int, num_parameters: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        half = torch.randn(
            num_workers // 2, num_parameters, generator=generator, dtype=torch.float64
        )
        self._throws = torch.cat([half, -half])

    def build(self) -> Vector:
        return Vector(self._throws.shape[1], torch.float64)

    def train_batch(self, worker: int, step: int) -> torch.Tensor:
        throw = self._throws[worker]
        return throw if step == 0 else torch.zeros_like(throw)

    def eval_batches(self) -> list[torch.Tensor]:
        return [torch.zeros_like(self._throws[0])]

    def loss(self, model: Vector, batch: torch.Tensor) -> torch.Tensor:
        return (batch * model()).sum()


def disagreement(method: GASLoC, *, workers: int, rounds: int, seed: int = 0, size: int = 8):
    """Mean squared disagreement after each round; at index 0 before the first gossip-only one."""
    result = run(
        method, task=Scattered(workers, size, seed), training=SGD, workers=workers, rounds=rounds,
        seed=seed, measure=Measure(every=1),
    )  # fmt: skip
    measured = [e for e in result.history if e["kind"] == "measure" and e["round"] >= 1]
    return np.array([event["consensus_l2"] for event in measured])


def test_the_ring_of_32_at_0_981_without_and_0_821_with_momentum() -> None:
    plain = GASLoC(inner_steps=1, topology="ring", alpha="auto", gamma=0, eta=1)
    squares = disagreement(plain, workers=32, rounds=90)
    assert (squares[-1] / squares[59]) ** (0.5 / 30) == pytest.approx(0.98097, abs=1e-3)
    fast = GASLoC(inner_steps=1, topology="ring", alpha="auto", gamma="auto", eta=1)
    squares = disagreement(fast, workers=32, rounds=90)
    # Both ends of the spectrum are double roots: x_t goes as t rate^t, and t is divided out.
    rate = (squares[-1] / squares[59] * (60 / 90) ** 2) ** (0.5 / 30)
    assert rate == pytest.approx(0.82147, abs=2e-3)


# topology, alpha, form, gamma: two on either side of 1
CELLS: list[tuple[str, float, Form, float]] = [
    ("random_pairs", 1.0, "A", 0.5),
    ("random_ring", 1.0, "B", 0.9),
    ("random_pairs", 1.0, "A", 0.9),
    ("random_pairs", 1.0, "A", 0.8),
]


@pytest.mark.parametrize(("topology", "alpha", "form", "gamma"), CELLS)
def test_rates_by_running_are_those_of_the_operator(
    topology: str, alpha: float, form: Form, gamma: float
) -> None:
    """The mean square over many runs of one method, each with its own random rounds."""
    method = GASLoC(
        inner_steps=1, topology=topology, alpha=alpha, form=form, gamma=gamma, eta=1,
        allow_unstable=True,
    )  # fmt: skip
    runs = [disagreement(method, workers=8, rounds=13, seed=s) for s in range(25)]
    squares = np.mean(runs, axis=0)
    rate = (squares[12] / squares[4]) ** (1 / 8)
    operator = consensus_rate(method.topology, "metropolis", 8, alpha=alpha, gamma=gamma, form=form)
    assert rate == pytest.approx(operator, abs=0.06)  # three standard deviations of the draws
    assert (rate < 1) == (operator < 1)


# ---------------------------------------------------------------------------------- what it refuses


def refused(workers: int = 8, **given_: Any) -> str:
    method = GASLoC(**given_)
    with pytest.raises(ConfigError) as caught:
        method.validate_for(ParameterLayout.of(Vector(3, torch.float32)), workers)
    return str(caught.value)


def test_an_unstable_choice_is_refused_with_its_rate_and_a_stable_one() -> None:
    assert refused(gamma=0.9) == (
        "method.gamma = 0.9 with alpha = 1, form A, lets the workers drift apart: on random_pairs "
        "with 8 workers their squared disagreement changes by a factor of 1.17 in a round; "
        "alpha = 1 with gamma = 0.6 is stable (0.851); or set method.allow_unstable = true"
    )
    assert "factor of 1.05" in refused(gamma=0.9, form="B")
    # twice the Laplacian of a ring: no momentum helps, a smaller alpha does
    assert "alpha = 0.25 with gamma = 0 is stable" in refused(
        topology="ring", weights="laplacian", alpha=2, gamma=0
    )
    layout = ParameterLayout.of(Vector(3, torch.float32))
    GASLoC(gamma=0.9, allow_unstable=True).validate_for(layout, 8)
    GASLoC(gamma=0.9).validate_for(layout, 1)
    GASLoC(gamma=0.7).validate_for(layout, 8)
    for form in FORMS:
        GASLoC(topology="ring", alpha="auto", gamma="auto", form=form).validate_for(layout, 1)
    edges = {"name": "edges", "pairs": [[0, 9]]}
    assert "worker 9 is not in this run" in refused(topology=edges)
    with pytest.raises(ConfigError, match="drift apart"):
        run(GASLoC(gamma=0.9))


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"alpha": 0}, "^alpha: a number above 0 expected, got 0$"),
        ({"gamma": 1}, "^gamma: a number from 0 to below 1 expected, got 1$"),
        ({"gamma": "auto"}, '^alpha and gamma: "auto" needs a fixed graph, and random_pairs ch'),
        (
            {"alpha": "auto", "form": "B", "topology": "ring"},
            '^alpha and gamma: form = "B" takes "auto" for both or for none$',
        ),
        ({"topology": "rink"}, r"^topology: unknown topology 'rink'; did you mean 'ring'\?$"),
        ({"eta": 0}, "^eta: .*greater than 0; got 0$"),
        ({"local_steps": "fast"}, "^local_steps: .*'equal', 'by_speed' or 'by_time'"),
    ],
)
def test_mistakes_are_named(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GASLoC(**given_)


@pytest.mark.parametrize("form", FORMS)
def test_auto_is_the_best_pair_of_the_rounds_graph(form: Form) -> None:
    method = GASLoC(topology="star", alpha="auto", gamma="auto", form=form)
    for members in ((0, 1, 2, 3, 4), (0, 2, 4)):
        graph = method.graph(seed=0, round_index=0, members=members)
        assert method.choice(graph) == optimal_choice(graph.laplacian(), form=form)
    method.validate_for(ParameterLayout.of(Vector(3, torch.float32)), 5)
    one = GASLoC(topology="ring", alpha="auto", gamma=0.3)
    graph = one.graph(seed=0, round_index=0, members=tuple(range(6)))
    assert one.choice(graph).gamma == 0.3


# --------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize(("topology", "degree"), [("random_pairs", 1), ("random_ring", 2)])
def test_cost_is_a_vector_to_each_neighbour_and_the_news(topology: str, degree: int) -> None:
    result = run(GASLoC(inner_steps=2, topology=topology), workers=6, rounds=5)
    sent = result.summary["bytes_by_kind"]
    assert sent == {
        "mix": 8 * result.summary["parameters"] * degree * 6 * 5,
        "news": 32 * 6 * degree * 6 * 5,
    }


def test_without_numerics_it_takes_the_same_time_and_bytes() -> None:
    given_ = {"workers": 6, "rounds": 5}
    real, none = (
        run(GASLoC(inner_steps=2), numerics=kind, **given_).summary for kind in ("real", "none")
    )
    same = ("time_s", "bytes_by_kind", "utilization", "records", "samples")
    assert {k: real[k] for k in same} == {k: none[k] for k in same}


# -------------------------------------------------------------------------------------- local steps


def test_steps_by_speed_is_the_ratio_of_speeds_rounded_down() -> None:
    rows = {0: Row(3, 0.1), 1: Row(3, 0.4), 2: Row(3, 0.15), 3: Row(3, 100.0)}
    assert [steps_by_speed(50, w, rows) for w in range(5)] == [50, 12, 33, 1, 50]
    # a ratio that is just below a whole number by rounding
    assert steps_by_speed(10, 1, {0: Row(0, 0.1), 1: Row(0, 0.1 * 3)}) == 3
    assert steps_by_speed(30, 1, {0: Row(0, 0.1), 1: Row(0, 0.1 * 3)}) == 10


def test_steps_by_time_let_an_exchange_end_with_the_others() -> None:
    # aim: 50 * 0.1 + 1 = 6; over worker 1's link an exchange takes 4 of them
    rows = {0: Row(3, 0.1, 1.0), 1: Row(3, 0.1, 4.0), 2: Row(3, 0.2, 1.0), 3: Row(3, 0.1, 9.0)}
    assert round_aim(50, rows) == round_aim(50, {**rows, 4: Row(3, 0.01)}) == 6
    assert round_aim(50, {4: Row(3, 0.01), 5: Row(3, 0.02)}) == 0.5

    def steps(worker: int, peers: list[int], most: int = 50) -> int:
        return steps_by_time(most, worker, rows, peers, round_index=4)

    assert steps(0, [2]) == 50
    assert steps(0, [1]) == steps(1, [0]) == 20
    assert (steps(2, [0]), steps(2, [0, 1])) == (25, 10)
    assert steps(3, [0]) == 1  # its link alone takes longer
    assert steps(0, [7]) == 50 and steps(7, [0]) == 50
    # who rests in this round does not count, and has all the time itself
    rows[1] = rows[1]._replace(next_mix=5)
    assert (steps(0, [1]), steps(1, [0])) == (50, 50)
    rows[2] = rows[2]._replace(next_mix=5)
    assert steps(2, [0]) == 30
    # with equal links it is the ratio of speeds
    equal = {w: row._replace(exchange_s=1.0, next_mix=0.0) for w, row in rows.items()}
    assert [steps_by_time(50, w, equal, [0], 4) for w in range(4)] == [
        steps_by_speed(50, w, equal) for w in range(4)
    ]


def test_who_does_not_fit_into_a_round_rests_so_that_rounds_lengthen_by_a_quarter() -> None:
    rows = {0: Row(3, 0.1, 1.0), 1: Row(3, 0.1, 5.9), 2: Row(3, 0.1, 6.0), 3: Row(3, 0.1, 16.0)}
    assert [rounds_to_rest(50, w, rows, [0]) for w in range(5)] == [0, 0, 0, 6, 0]
    assert rounds_to_rest(50, 3, rows, []) == rounds_to_rest(50, 3, rows, [3, 8]) == 0
    # each 7 rounds of 6 s last 0.1 + 16 - 6 s longer: 24 % of 42 s
    assert (0.1 + 16 - 6) / (7 * 6) <= LENGTHENING < (0.1 + 16 - 6) / (6 * 6)


def test_news_keeps_what_is_newest() -> None:
    numbers: list[float] = []
    news = News(numbers, 3)
    assert news.known(range(3), since=-5) == {} and news.row(1).round_index == NOTHING
    news.note(1, Row(4, 0.5, 2.0, 7.0))
    assert News(numbers, 3).row(1) == Row(4, 0.5, 2.0, 7.0)
    news.note(0, Row(1, 0.1))
    assert sorted(news.known(range(3), since=2)) == [1]
    assert sorted(news.known([0, 2], since=0)) == [0]
    # of 3 members nothing may be older than 3 rounds
    assert [news.num_reached([0, 1, 2], r) for r in (2, 4, 5, 7, 8)] == [3, 2, 1, 1, 0]


def test_news_spreads_from_peer_to_peer_and_old_news_does_not() -> None:
    async def work(ctx: Context, round_: Round) -> list[float]:
        numbers: list[float] = []
        news = News(numbers, 3)
        news.note(ctx.worker, Row(5.0 + ctx.worker, 0.5))
        news.note(1, Row(9.0 if ctx.worker == 0 else 3.0, 0.25 * (1 + ctx.worker)))
        peer = {0: 1, 1: 0, 2: 2}[ctx.worker]
        if ctx.worker < 2:
            assert await news.swap(ctx, round_, "news", peer)
        return [x for worker in range(3) for x in news.row(worker)[:2]]

    results = run_workers(3, work).results
    assert results[0] == results[1] == [5.0, 0.5, 9.0, 0.25, NOTHING, 0.0]
    assert results[2] == [NOTHING, 0.0, 3.0, 0.75, 7.0, 0.5]


def test_an_exchange_tells_of_the_slower_of_two_links() -> None:
    news = News([], 3)
    for worker in range(3):
        news.note(worker, Row(0, 0.1))
    news.note_exchange(0, 1, 40.0)  # nothing is known: it may have been either
    assert news.row(0).exchange_s == 40.0
    news.note_exchange(0, 2, 4.0)  # so it was worker 1's
    assert news.row(0).exchange_s == 4.0
    news.note(1, news.row(1)._replace(exchange_s=40.0))
    news.note_exchange(0, 1, 40.0)
    assert news.row(0).exchange_s == 4.0
    news.note(2, news.row(2)._replace(exchange_s=4.0))
    news.note_exchange(0, 2, 12.0)  # worker 2 has done better: our link is slower than it was
    assert news.row(0).exchange_s == 8.0
