"""Every method takes a codec, or says why not; what was lost is kept, saved, and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.codec import codec_of
from gossamer.comm.context import Context, MethodState
from gossamer.errors import ConfigError
from gossamer.measure.settings import Measure
from gossamer.methods import METHODS, DiLoCo, build_method
from gossamer.sim.compute import Timing
from gossamer.sim.faults import CrashAt, Faults
from gossamer.sim.network import Network
from gossamer.sim.simulate import SimulationResult, simulate
from gossamer.training.problems import TinyMLP
from gossamer.training.settings import Training

ALONE = ("anytime_sgd", "mu2_sgd", "storm")
AGREEING = (
    "data_parallel", "diloco", "fedac", "local_mixvr", "local_momentum", "local_sgd",
    "minibatch_asgd", "minibatch_sgd", "slowcal_sgd", "slowmo",
)  # fmt: skip
ENCODED = ("average", "delta", "estimator", "fragment", "gradient", "meetings", "mix", "mix1",
           "mix2", "outer", "points", "push")  # fmt: skip


def run(name: str, *, workers: int = 4, **given_: Any) -> SimulationResult:
    return simulate(
        method=build_method(name, {"inner_steps": 3, **given_}),
        task=TinyMLP(),
        training=Training(learning_rate=0.02),
        workers=workers,
        rounds=3,
        measure=Measure(every=0),
    )


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ALONE])
def test_a_method_runs_with_a_codec_and_sends_about_its_bits(name: str) -> None:
    """4 bits for 32, and 16 for each block of 8; letters have a note beside."""
    plain, coded = run(name), run(name, codec="int4:8")
    assert bool(torch.isfinite(coded.parameters).all())
    assert not torch.equal(plain.parameters, coded.parameters)
    before, after = plain.summary["bytes_by_kind"], coded.summary["bytes_by_kind"]
    assert before.keys() == after.keys()
    kinds = [kind for kind in before if kind in ENCODED]
    assert kinds
    for kind in kinds:
        assert before[kind] * 6 / 32 <= after[kind] <= before[kind] * 9 / 32
    for kind in before.keys() - kinds:
        assert after[kind] == before[kind]
    if name in AGREEING:
        assert all(torch.equal(row, coded.parameters[0]) for row in coded.parameters)


@pytest.mark.parametrize("name", ALONE)
def test_a_method_that_sends_nothing_refuses_a_codec(name: str) -> None:
    with pytest.raises(ConfigError, match=f"codec: {name} sends nothing that could be encoded"):
        build_method(name, {"codec": "int8"})


@pytest.mark.parametrize(
    ("name", "given_", "message"),
    [
        ("gasloc", {"codec": "topk:0.1"}, "'topk:0.1' leaves values out, and gasloc sends"),
        ("slowmo", {"base": "gossip", "codec": "topk:0.1"}, "slowmo sends parameters themselves"),
        ("GlobalM1", {"codec": "topk:0.1"}, "factored_gossip sends parameters themselves"),
        ("diloco", {"codec": "int5"}, "unknown codec 'int5'; did you mean"),
        ("diloco", {"error_feedback": True}, "error_feedback: needs a codec"),
        ("dsgd", {"codec": "int8", "error_feedback": True}, "error_feedback: with dsgd"),
    ],
)
def test_what_would_not_work_is_refused(name: str, given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_method(name, given_)


@pytest.mark.parametrize("name", AGREEING)
def test_the_largest_values_alone_with_what_was_left_out_later(name: str) -> None:
    result = run(name, codec="topk:0.1")
    assert all(torch.equal(row, result.parameters[0]) for row in result.parameters)
    assert not torch.equal(result.parameters, run(name).parameters)


def test_an_int8_outer_gradient_costs_its_bytes_with_and_without_numerics() -> None:
    size = TinyMLP().build()
    num_values = sum(p.numel() for p in size.parameters())
    chunks = [c.numel() for c in torch.arange(num_values).tensor_split(4)]
    each = [codec_of("int8").num_bytes(numel) for numel in chunks]
    # Each worker sends the others' chunks and, to three of them, its own mean; and three votes.
    expected = [3 * (sum(each) - each[w] + 3 * each[w] + 3) for w in range(4)]
    for numerics in ("real", "none"):
        result = simulate(
            method=DiLoCo(inner_steps=2, codec="int8"), task=TinyMLP(), workers=4, rounds=3,
            training=Training(), measure=Measure(every=0), numerics=numerics,
        )  # fmt: skip
        assert [result.ledger.total(sender=w) for w in range(4)] == expected


class Watched(DiLoCo):
    """DiLoCo whose residuals are looked at when a life begins."""

    async def run(self, ctx: Context, state: MethodState) -> None:
        assert state.residual is not None
        LIVES.append((ctx.worker, state.rounds_completed, state.residual.clone()))
        await super().run(ctx, state)
        LIVES.append((ctx.worker, state.rounds_completed, state.residual.clone()))


LIVES: list[tuple[int, int, Tensor]] = []


def test_a_joiner_takes_nobody_elses_residual() -> None:
    LIVES.clear()
    result = simulate(
        method=Watched(inner_steps=2, codec="topk:0.1"), task=TinyMLP(), workers=4, rounds=12,
        training=Training(learning_rate=0.02), measure=Measure(every=0),
        timing=Timing(step_time=1.0), network=Network(deadline="10s"),
        faults=Faults(crashes=[CrashAt(worker=2, start=5.0, return_after=4.0)]),
    )  # fmt: skip
    begun = [(worker, residual) for worker, rounds, residual in LIVES if rounds < 12]
    ended = [(worker, residual) for worker, rounds, residual in LIVES if rounds == 12]
    assert sorted(worker for worker, _ in begun) == [0, 1, 2, 2, 3]
    assert all(not residual.any() for _, residual in begun)
    assert len(ended) == 4 and all(bool(residual.any()) for _, residual in ended)
    assert all(torch.equal(row, result.parameters[0]) for row in result.parameters)
