"""Blocks partition any model, and their patterns select exactly their slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gossamer.errors import ConfigError
from gossamer.measure.blocks import Block, blocks_of
from gossamer.training.layout import ParameterLayout, Slot


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([Layer() for _ in range(12)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)


class Wrapped(nn.Module):
    """As a Hugging Face model is: everything but the head below `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(4, 7)


def fake_layout(names: list[str]) -> ParameterLayout:
    return ParameterLayout(
        tuple(Slot(n, (2, 1), 2 * k, torch.float32, True) for k, n in enumerate(names))
    )


def assert_partition(layout: ParameterLayout, blocks: tuple[Block, ...]) -> None:
    covered = torch.zeros(layout.numel)
    for block in blocks:
        size = sum(s.stop - s.start for s in block.slices)
        assert block.numel == size > 0
        assert block.share == size / layout.numel
        assert layout.select(block.patterns) == block.slices
        for piece in block.slices:
            covered[piece] += 1
    assert bool((covered == 1).all())
    assert len({block.name for block in blocks}) == len(blocks)


def names(model: nn.Module, depth: int = 1) -> set[str]:
    layout = ParameterLayout.of(model)
    blocks = blocks_of(layout, depth=depth)
    assert_partition(layout, blocks)
    return {block.name for block in blocks}


def test_a_decoder_falls_into_embedding_layers_norm_and_head() -> None:
    assert names(Decoder()) == {
        "embedding", "norm", "head", *(f"layers.{k}" for k in range(12))
    }  # fmt: skip


def test_layer_1_does_not_swallow_layer_11() -> None:
    layout = ParameterLayout.of(Decoder())
    for block in blocks_of(layout):
        if block.name.startswith("layers."):
            selected = layout.select(block.patterns)
            assert sum(s.stop - s.start for s in selected) == block.numel == 2 * 20 + 8


def test_a_wrapper_is_looked_into() -> None:
    found = names(Wrapped())
    assert {"model.embedding", "model.norm", "model.head", "lm_head", "model.layers.3"} <= found
    assert "model" not in found


def test_depth_two_cuts_experts() -> None:
    found = names(Decoder(), depth=2)
    assert {"layers.3.experts.0", "layers.3.experts.1", "layers.3.norm", "embedding"} <= found
    assert "layers.3" not in found


def test_plain_modules() -> None:
    assert names(nn.Linear(3, 2)) == {"weight", "bias"}
    assert names(nn.Linear(3, 2, bias=False)) == {"weight"}
    assert names(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))) == {"0", "2"}
    assert names(nn.Sequential(nn.Linear(3, 2))) == {"0.weight", "0.bias"}
    inner = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    assert names(nn.ModuleDict({"module": inner})) == {"module.body", "module.head"}
    assert names(nn.ParameterList([torch.zeros(2), torch.zeros(3)])) == {"0", "1"}


def test_tied_once_and_frozen_not_at_all() -> None:
    model = Decoder()
    model.head.weight = model.embedding.weight
    model.norm.requires_grad_(False)
    found = names(model)
    assert "embedding" in found
    assert not {"head", "norm"} & found


def test_names_that_look_like_globs_select_only_themselves() -> None:
    layout = fake_layout(["a[b].w", "ab.w", "x*.w", "xy.w", "q?.w", "qq.w"])
    assert_partition(layout, blocks_of(layout))
    assert_partition(layout, blocks_of(layout, granularity="tensor"))


def test_every_tensor_its_own_block() -> None:
    layout = ParameterLayout.of(Wrapped())
    blocks = blocks_of(layout, granularity="tensor")
    assert_partition(layout, blocks)
    assert tuple(block.name for block in blocks) == layout.names


PARTS = st.sampled_from(["a", "b", "layers", "0", "1", "11", "w"])
PATHS = st.lists(PARTS, min_size=1, max_size=5).map(tuple)


@given(st.lists(PATHS, min_size=1, max_size=12, unique=True), st.integers(1, 3))
def test_any_tree_of_names_is_partitioned(paths: list[tuple[str, ...]], depth: int) -> None:
    # in a module a name is a tensor or a module, never both
    leaves = [p for p in paths if not any(q[: len(p)] == p and q != p for q in paths)]
    layout = fake_layout([".".join(p) for p in leaves])
    blocks = blocks_of(layout, depth=depth)
    assert_partition(layout, blocks)


def test_nonsense_is_refused() -> None:
    layout = fake_layout(["a"])
    with pytest.raises(ConfigError, match="at least 1; got 0"):
        blocks_of(layout, depth=0)
    with pytest.raises(ConfigError, match="granularity"):
        blocks_of(layout, granularity="layer")  # type: ignore[arg-type]
