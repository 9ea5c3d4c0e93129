"""Agreement on buffers: the mean of floats, the maximum of integers, in groups, with failures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gossamer.comm.buffers import synchronise_buffers
from gossamer.comm.context import Context, Round
from gossamer.sim.network import Network
from gossamer.testing import Outcome, run_workers


class Buffered:
    """A model of one weight, two float buffers and three integers."""

    def build(self) -> nn.Module:
        model = nn.Linear(1, 1)
        model.register_buffer("floats", torch.zeros(2))
        model.register_buffer("integers", torch.zeros(3, dtype=torch.int64))
        return model

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch).sum()
        return loss

    def train_batch(self, worker: int, step: int) -> Tensor:
        return torch.ones(1, 1)

    def eval_batches(self) -> list[Tensor]:
        return [torch.ones(1, 1)]


def synchronise(
    groups: list[tuple[int, ...]], network: Network | None = None, seed: int = 0
) -> Outcome[tuple[list[float], list[int]]]:
    """Worker m starts with floats (m, 2 m) and integers (m, -m, 5)."""

    async def work(ctx: Context, round_: Round) -> tuple[list[float], list[int]]:
        me = ctx.worker
        ctx.replica.buffers.copy_(torch.tensor([me, 2.0 * me]))
        ctx.replica.counters.copy_(torch.tensor([me, -me, 5]))
        before = ctx.replica.parameters.clone()
        (group,) = (group for group in groups if me in group)
        await synchronise_buffers(ctx, round_, group)
        assert torch.equal(before, ctx.replica.parameters)
        return ctx.replica.buffers.tolist(), ctx.replica.counters.tolist()

    return run_workers(sum(map(len, groups)), work, task=Buffered(), network=network, seed=seed)


def test_the_mean_of_floats_and_the_maximum_of_integers() -> None:
    outcome = synchronise([(0, 1, 2, 3, 4)])
    assert all(result == ([2.0, 4.0], [4, 0, 5]) for result in outcome.results.values())


def test_groups_agree_among_themselves_and_one_alone_sends_nothing() -> None:
    outcome = synchronise([(0, 3), (1, 2), (4,)])
    assert outcome.results == {
        0: ([1.5, 3.0], [3, 0, 5]),
        1: ([1.5, 3.0], [2, -1, 5]),
        2: ([1.5, 3.0], [2, -1, 5]),
        3: ([1.5, 3.0], [3, 0, 5]),
        4: ([4.0, 8.0], [4, -4, 5]),
    }
    assert outcome.ledger.total(sender=4) == outcome.ledger.total(receiver=4) == 0


@pytest.mark.parametrize("unit", ["worker", "step", "transfer", "collective"])
def test_lost_links_conserve_the_sum_and_never_lower_a_counter(unit: str) -> None:
    left_out = 0.0
    for seed in range(8):
        network = Network(failure_probability=0.2, failure_unit=unit)  # type: ignore[arg-type]
        outcome = synchronise([(0, 1, 2, 3)], network, seed)
        floats = torch.tensor([floats for floats, _ in outcome.results.values()])
        assert torch.allclose(floats.sum(0), torch.tensor([6.0, 12.0]), atol=1e-5)
        for worker, (_, integers) in outcome.results.items():
            assert worker <= integers[0] <= 3 and -worker <= integers[1] <= 0 and integers[2] == 5
        left_out += outcome.recorded("left_out")
    assert (left_out > 0) == (unit == "worker")  # the other units strike large transfers only
