"""L2 consensus against its definition, pair by pair."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.measure import consensus
from gossamer.measure.consensus import l2_consensus, worker_mean


def pairwise(parameters: torch.Tensor) -> float:
    rows = parameters.double().numpy()
    pairs = list(itertools.combinations(range(len(rows)), 2))
    return float(np.mean([((rows[i] - rows[j]) ** 2).sum() for i, j in pairs]))


@given(st.integers(2, 7), st.integers(1, 50), st.integers(0, 2**30))
def test_equals_the_mean_over_pairs(num_workers: int, numel: int, seed: int) -> None:
    x = torch.randn(num_workers, numel, generator=torch.Generator().manual_seed(seed))
    assert l2_consensus(x) == pytest.approx(pairwise(x), rel=1e-12)


@pytest.mark.parametrize("block_elements", [1, 7, 64, 10_000])
def test_any_block_size_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, block_elements: int
) -> None:
    x = torch.randn(5, 101, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(consensus, "_BLOCK_ELEMENTS", block_elements)
    assert l2_consensus(x) == pytest.approx(pairwise(x), rel=1e-12)
    assert torch.equal(worker_mean(x), x.double().mean(dim=0).float())


def test_two_workers_by_hand() -> None:
    assert l2_consensus(torch.tensor([[0.0, 0.0], [3.0, 4.0]])) == 25.0


def test_one_worker_and_equal_workers_agree() -> None:
    row = torch.randn(1, 33, generator=torch.Generator().manual_seed(0))
    assert l2_consensus(row) == 0.0
    for num_workers in (2, 3, 7):
        assert l2_consensus(row.repeat(num_workers, 1)) == 0.0
        assert torch.equal(worker_mean(row.repeat(num_workers, 1)), row[0])


def test_small_differences_of_large_values_survive() -> None:
    """fp32 sums of squares would lose all of this: 1e-3 apart, at 1e3, in 20000 places."""
    x = torch.full((4, 20_000), 1000.0)
    x[0] += 2.0**-10
    assert l2_consensus(x) == pytest.approx(0.5 * 20_000 * 2.0**-20, rel=1e-9)


def test_parameters_are_only_read_and_may_need_gradients() -> None:
    x = torch.randn(3, 10, dtype=torch.bfloat16, requires_grad=True)
    before = x.detach().clone()
    assert l2_consensus(x) == pytest.approx(pairwise(before), rel=1e-12)
    assert torch.equal(x.detach(), before)
    assert worker_mean(x).dtype is torch.bfloat16
    assert not worker_mean(x).requires_grad


def test_a_diverged_worker_is_not_hidden() -> None:
    x = torch.zeros(3, 4)
    x[1, 2] = math.nan
    assert math.isnan(l2_consensus(x))
