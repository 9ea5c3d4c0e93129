"""Mixes whose payloads a codec writes conserve their sum, whatever the codec loses or the links."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.codec import codec_of
from gossamer.comm.coding import Coding
from gossamer.comm.context import Context, Round
from gossamer.comm.neighbours import mix_neighbours
from gossamer.comm.pairs import average_pair
from gossamer.comm.push import push_shares
from gossamer.measure.settings import Measure
from gossamer.methods import build_method
from gossamer.mixing.topologies import mixing_graph, parse_topology
from gossamer.sim.network import Network
from gossamer.sim.simulate import simulate
from gossamer.testing import run_workers
from gossamer.training.problems import PureNoise
from gossamer.training.settings import Training

CODECS = ("bf16", "int8", "int4", "int1", "e3m0", "topk:0.1")
PLANS = {
    "codec": st.sampled_from(CODECS),
    "unit": st.sampled_from(["worker", "step", "transfer", "collective"]),
    "probability": st.sampled_from([0.0, 0.1, 0.4]),
    "seed": st.integers(0, 10_000),
}


def inputs(num_workers: int, size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_workers, size, generator=generator, dtype=torch.float64)


def failing(unit: str, probability: float) -> Network:
    return Network(failure_probability=probability, failure_unit=unit, latency="10ms")  # type: ignore[arg-type]


def seen(values: Tensor, codec: str) -> Tensor:
    out = torch.empty_like(values)
    codec_of(codec).decode(codec_of(codec).encode(values), out)
    return out


@given(**PLANS)
@settings(max_examples=25, deadline=None)
def test_a_pair_moves_by_half_the_difference_of_what_is_seen_or_not_at_all(
    codec: str, unit: str, probability: float, seed: int
) -> None:
    values = inputs(2, 1500, seed)

    async def work(ctx: Context, round_: Round) -> tuple[bool, Tensor]:
        mine = values[ctx.worker].clone()
        mixed = await average_pair(ctx, round_, "mix", mine, 1 - ctx.worker, coding=Coding(codec))
        return mixed, mine

    outcome = run_workers(2, work, network=failing(unit, probability), seed=seed)
    (mixed, one), (mixed_too, other) = outcome.results[0], outcome.results[1]
    assert mixed == mixed_too
    step = (seen(values[1], codec) - seen(values[0], codec)) / 2 if mixed else 0 * values[0]
    assert float((one - (values[0] + step)).abs().max()) < 1e-14
    assert float((other - (values[1] - step)).abs().max()) < 1e-14
    if probability == 0:
        sent = codec_of(codec).num_bytes(1500)
        assert [outcome.ledger.total(sender=worker) for worker in (0, 1)] == [sent, sent]


@given(**PLANS)
@settings(max_examples=25, deadline=None)
def test_neighbours_conserve_the_sum_and_equal_vectors_keep_their_bits(
    codec: str, unit: str, probability: float, seed: int
) -> None:
    values = inputs(5, 300, seed)
    values[:, 100:200] = values[0, 100:200]  # equal, in blocks of their own below
    parts = Coding(codec, parts=3)

    async def work(ctx: Context, round_: Round) -> Tensor:
        mine, neighbours = values[ctx.worker].clone(), graph.neighbours(ctx.worker)
        await mix_neighbours(ctx, round_, "mix", mine, neighbours, coding=parts)
        return mine

    ring = parse_topology("ring")
    graph = mixing_graph(ring, "metropolis", seed=0, round_index=0, members=range(5))
    outcome = run_workers(5, work, network=failing(unit, probability), seed=seed)
    mixed = torch.stack(list(outcome.results.values()))
    assert float((mixed.sum(0) - values.sum(0)).abs().max()) < 1e-14 * 20
    assert torch.equal(mixed[:, 100:200], values[:, 100:200])
    assert probability > 0 or not torch.equal(mixed, values)


@given(**PLANS)
@settings(max_examples=25, deadline=None)
def test_pushed_shares_conserve_the_mass_and_weights_go_exactly(
    codec: str, unit: str, probability: float, seed: int
) -> None:
    masses = torch.cat([inputs(4, 200, seed), torch.ones(4, 1).double()], dim=1)
    arcs = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]

    def run(coding: Coding) -> Tensor:
        async def work(ctx: Context, round_: Round) -> Tensor:
            mine = masses[ctx.worker].clone()
            for step in range(3):
                await push_shares(ctx, round_, "push", mine, arcs, step=step, coding=coding)
            return mine

        outcome = run_workers(4, work, network=failing(unit, probability), seed=seed)
        return torch.stack(list(outcome.results.values()))

    plain, coded = run(Coding()), run(Coding(codec, exact_tail=1))
    assert float((coded.sum(0) - masses.sum(0)).abs().max()) < 1e-13
    if probability == 0:
        assert torch.equal(coded[:, -1], plain[:, -1])
        assert not torch.equal(coded, plain)


PLAIN_SGD = Training(
    optimizer="sgd", learning_rate=0.1, schedule="constant", clip_norm=0, weight_decay=0
)
MIXERS: list[tuple[str, dict[str, object]]] = [
    ("LocalM1M2", {}),
    ("gasloc", {}),
    ("gasloc", {"local_steps": "by_time", "topology": "ring"}),
    ("noloco", {}),
    ("dsgd", {"topology": "ring"}),
    ("dsgd", {"order": "adapt_then_combine", "topology": "ring"}),
    ("ad_psgd", {}),
    ("a2cid2", {"topology": "ring"}),
]


@pytest.mark.parametrize(("name", "given_"), MIXERS)
@pytest.mark.parametrize("probability", [0.0, 0.2])
def test_a_methods_mean_does_not_depend_on_the_codec(
    name: str, given_: dict[str, object], probability: float
) -> None:
    """Gradients are noise that does not see the weights, so the mean tells of the mixing alone."""

    def run(codec: str) -> tuple[Tensor, dict[str, int]]:
        result = simulate(
            method=build_method(name, {"inner_steps": 3, "codec": codec, **given_}),
            task=PureNoise(60, dtype=torch.float64),
            training=PLAIN_SGD,
            workers=6,
            rounds=5,
            measure=Measure(every=0),
            network=Network(failure_probability=probability, failure_unit="transfer"),
        )
        return result.parameters, result.summary["bytes_by_kind"]

    (plain, plain_bytes), (coded, coded_bytes) = run("none"), run("int4")
    assert torch.allclose(coded.mean(0), plain.mean(0), rtol=0, atol=1e-12)
    assert float((coded - plain).abs().max()) > 1e-3
    if probability == 0:
        for kind in ("mix", "mix1", "mix2", "outer", "meetings"):
            per_message = 60 * 8 if kind != "outer" else 120 * 8
            coded_message = (30 + 2) if kind != "outer" else 2 * (30 + 2)
            messages = plain_bytes.get(kind, 0) / per_message
            assert coded_bytes.get(kind, 0) == messages * coded_message
