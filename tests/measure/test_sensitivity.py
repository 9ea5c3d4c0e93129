"""The block that makes workers disagree is found, proposed, and written as a recipe selects it."""

from __future__ import annotations

import json
import tomllib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from gossamer.errors import ConfigError
from gossamer.measure.blocks import Block, blocks_of
from gossamer.measure.divergence import js_distance
from gossamer.measure.probes import log_probabilities
from gossamer.measure.sensitivity import (
    BlockSensitivity,
    SensitivityResult,
    propose_subset,
    rank_blocks,
    recipe_fragment,
)
from gossamer.training.layout import ParameterLayout

NUM_WORKERS = 3


class Problem:
    """A small classifier; each worker is the same model, with some blocks perturbed."""

    def __init__(self, scales: dict[str, float]) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict(
            {
                "embed": nn.Linear(6, 16),
                "layers": nn.ModuleList([nn.Linear(16, 16) for _ in range(3)]),
                "head": nn.Linear(16, 5),
            }
        )
        self.layout = ParameterLayout.of(self.model)
        self.blocks = blocks_of(self.layout)
        self.inputs = torch.randn(20, 6)
        flat = torch.cat([dict(self.model.named_parameters())[n].detach().flatten()
                          for n in self.layout.names])  # fmt: skip
        self.workers = flat.repeat(NUM_WORKERS, 1)
        for block in self.blocks:
            for piece in block.slices:
                noise = torch.randn(NUM_WORKERS, piece.stop - piece.start)
                self.workers[:, piece] += scales.get(block.name, 0.0) * noise

    def predict(self, flat: Tensor) -> Tensor:
        w = self.layout.views(flat)

        def linear(name: str, x: Tensor) -> Tensor:
            return nn.functional.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

        x = linear("embed", self.inputs).relu()
        for k in range(3):
            x = x + linear(f"layers.{k}", x).relu()
        return linear("head", x)

    def rank(self) -> SensitivityResult:
        return rank_blocks(self.workers, self.layout, self.predict, self.blocks)


@pytest.mark.parametrize("planted", ["embed", "layers.0", "layers.1", "layers.2", "head"])
def test_planted_block_comes_first(planted: str) -> None:
    noise = dict.fromkeys(["embed", "layers.0", "layers.1", "layers.2", "head"], 0.002)
    problem = Problem(noise | {planted: 0.3})
    result = problem.rank()
    assert result.by_drop()[0].block.name == planted
    assert result.by_drop_per_parameter()[0].block.name == planted
    assert result.by_drop()[0].drop > 0.8 * result.baseline_js
    loudest = max(result.rows, key=lambda row: row.js_rest_averaged or 0.0)
    assert loudest.block.name == planted
    assert propose_subset(result, 0.5)[0].name == planted


def test_only_one_block_differs() -> None:
    """Then averaging it is full agreement, averaging another changes nothing."""
    result = Problem({"layers.1": 0.2}).rank()
    assert result.baseline_js > 0.01
    for row in result.rows:
        if row.block.name == "layers.1":
            assert row.js_block_averaged == 0.0
            assert row.drop == result.baseline_js
            assert row.js_rest_averaged == result.baseline_js
        else:
            assert row.js_block_averaged == result.baseline_js
            assert row.drop == 0.0
            assert row.js_rest_averaged == 0.0


def test_rows_equal_doing_it_by_hand() -> None:
    problem = Problem(dict.fromkeys(["embed", "layers.0", "layers.2", "head"], 0.1))
    result = problem.rank()

    def distance(workers: Tensor) -> float:
        return js_distance([log_probabilities(problem.predict(w)) for w in workers])

    assert result.baseline_js == distance(problem.workers)
    for row, block in zip(result.rows, problem.blocks, strict=True):
        mean = problem.workers.double().mean(dim=0).float().expand(NUM_WORKERS, -1)
        averaged, rest = problem.workers.clone(), mean.clone()
        for piece in block.slices:
            averaged[:, piece] = mean[:, piece]
            rest[:, piece] = problem.workers[:, piece]
        assert row.block is block
        assert row.js_block_averaged == distance(averaged)
        assert row.drop == result.baseline_js - row.js_block_averaged
        assert row.drop_per_parameter == row.drop / block.numel
        assert row.js_rest_averaged == distance(rest)


def test_workers_are_only_read_and_progress_is_told() -> None:
    problem = Problem({"head": 0.1})
    before = problem.workers.clone()
    told: list[tuple[int, int, str]] = []
    result = rank_blocks(
        problem.workers,
        problem.layout,
        problem.predict,
        problem.blocks,
        complement=False,
        progress=lambda done, total, block: told.append((done, total, block.name)),
    )
    assert torch.equal(problem.workers, before)
    assert told == [(k + 1, 5, block.name) for k, block in enumerate(problem.blocks)]
    assert all(row.js_rest_averaged is None for row in result.rows)


def test_any_module_through_functional_call() -> None:
    """A bare linear map: the bias is what differs."""
    model = nn.Linear(2, 3)
    layout = ParameterLayout.of(model)
    workers = torch.zeros(2, layout.numel)
    workers[1, layout.select(["bias"])[0]] = torch.tensor([1.0, 0.0, -1.0])

    def predict(flat: Tensor) -> Tensor:
        out = functional_call(model, layout.views(flat), (torch.eye(2),))
        assert isinstance(out, Tensor)
        return out

    result = rank_blocks(workers, layout, predict, blocks_of(layout))
    assert [row.block.name for row in result.by_drop()] == ["bias", "weight"]


def fake_result(drops: list[float], sizes: list[int]) -> SensitivityResult:
    total = sum(sizes)
    rows = []
    for k, (drop, size) in enumerate(zip(drops, sizes, strict=True)):
        block = Block(f"b{k}", (f"b{k}",), (slice(0, size),), size, size / total)
        rows.append(BlockSensitivity(block, 0.5 - drop, drop, None))
    return SensitivityResult(0.5, tuple(rows))


def test_rankings_by_drop_and_by_drop_per_parameter() -> None:
    result = fake_result([0.1, 0.3, 0.05, 0.3], [10, 300, 1, 300])
    assert [r.block.name for r in result.by_drop()] == ["b1", "b3", "b0", "b2"]
    assert [r.block.name for r in result.by_drop_per_parameter()] == ["b2", "b0", "b1", "b3"]
    entries = json.loads(json.dumps(result.to_dict()))["blocks"]
    assert [entry["name"] for entry in entries] == ["b1", "b3", "b0", "b2"]
    assert entries[0]["parameters"] == 300


def test_greedy_passes_over_what_does_not_fit() -> None:
    result = fake_result([0.4, 0.3, 0.2, -0.1], [50, 40, 10, 1])
    assert [b.name for b in propose_subset(result, 0.55)] == ["b2", "b1"]
    assert [b.name for b in propose_subset(result, 0.40)] == ["b2"]
    assert [b.name for b in propose_subset(result, 1.0)] == ["b2", "b0", "b1"]  # b3 only harms


def test_exact_share_fits_despite_rounding() -> None:
    result = fake_result([0.1] * 10, [1] * 10)
    for count in range(1, 11):
        assert len(propose_subset(result, count / 10)) == count


@given(
    st.lists(st.tuples(st.floats(0.001, 0.4), st.integers(1, 500)), min_size=1, max_size=9),
    st.floats(0.01, 1.0),
)
def test_share_is_never_exceeded(rows: list[tuple[float, int]], share: float) -> None:
    result = fake_result([d for d, _ in rows], [n for _, n in rows])
    total = sum(n for _, n in rows)
    fits = [n for _, n in rows if n <= share * total]
    if not fits:
        with pytest.raises(ConfigError, match="no block fits"):
            propose_subset(result, share)
        return
    chosen = propose_subset(result, share)
    used = sum(b.numel for b in chosen)
    assert used <= share * total * (1 + 1e-9)
    left = [r.block for r in result.rows if r.block not in chosen]
    assert all(used + b.numel > share * total * (1 - 1e-9) for b in left)


def test_smallest_share_is_told_where_nothing_fits() -> None:
    result = fake_result([0.4, 0.3], [60, 40])
    with pytest.raises(ConfigError, match=r"'b1', has 40\.000%"):
        propose_subset(result, 0.1)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_share_out_of_range(share: float) -> None:
    with pytest.raises(ConfigError, match="at most 1"):
        propose_subset(fake_result([0.1], [1]), share)


def test_workers_that_agree_give_no_proposal() -> None:
    result = Problem({}).rank()
    assert result.baseline_js == 0.0
    with pytest.raises(ConfigError, match="train longer"):
        propose_subset(result, 0.5)


def test_fragment_selects_exactly_the_proposed_slices() -> None:
    problem = Problem(dict.fromkeys(["embed", "layers.0", "layers.2", "head"], 0.1))
    chosen = propose_subset(problem.rank(), 0.6)
    assert len(chosen) > 1
    text = recipe_fragment(chosen)
    patterns = tomllib.loads(text)["method"]["mix2_subset"]
    selected = torch.zeros(problem.layout.numel)
    for piece in problem.layout.select(patterns):
        selected[piece] = 1
    expected = torch.zeros(problem.layout.numel)
    for block in chosen:
        for piece in block.slices:
            expected[piece] = 1
    assert torch.equal(selected, expected)
    share = 100 * float(expected.mean())
    assert text.startswith(f"# {len(chosen)} blocks, {share:.1f}% of the parameters")


def test_nonsense_is_refused() -> None:
    p = Problem({"head": 0.1})
    with pytest.raises(ConfigError, match="two or more are needed; 1 given"):
        rank_blocks(p.workers[:1], p.layout, p.predict, p.blocks)
    with pytest.raises(ConfigError, match="the workers have"):
        rank_blocks(p.workers[:, 1:], p.layout, p.predict, p.blocks)
    with pytest.raises(ConfigError, match="no blocks"):
        rank_blocks(p.workers, p.layout, p.predict, [])
    p.workers[1, 0] = float("nan")
    with pytest.raises(ConfigError, match="worker 1 predicts NaN"):
        p.rank()
