"""The flat layout: every trainable tensor once, in a fixed order, found by name."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.training.layout import ParameterLayout, gather, merge, scatter


class Tied(nn.Module):
    """An embedding whose weight is also the head's, a norm, and a frozen table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.table = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(2.0))


LAYOUT = ParameterLayout.of(Tied())


def test_tied_once_frozen_not_at_all_decayed_first_each_in_the_models_order() -> None:
    assert [(s.name, s.shape, s.offset, s.decay) for s in LAYOUT.slots] == [
        ("embedding.weight", (5, 3), 0, True),
        ("scale", (), 15, False),
        ("norm.weight", (3,), 16, False),
        ("norm.bias", (3,), 19, False),
        ("head.bias", (5,), 22, False),
    ]
    assert LAYOUT.numel == 27 and LAYOUT.num_decayed == 15
    assert LAYOUT.slots[0].aliases == ("head.weight",)


def test_the_slots_tile_the_flat_vector() -> None:
    ends = [0, *(slot.end for slot in LAYOUT.slots)]
    assert [slot.offset for slot in LAYOUT.slots] == ends[:-1] and ends[-1] == LAYOUT.numel


def test_views_share_the_flat_vectors_storage() -> None:
    flat = torch.arange(27.0)
    views = LAYOUT.views(flat)
    assert list(views) == list(LAYOUT.names)
    assert views["scale"].shape == () and float(views["scale"]) == 15.0
    views["embedding.weight"][1, 2] = -1.0
    assert flat[5] == -1.0


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.bfloat16, torch.bfloat16), torch.float32),
        ((torch.float16, torch.float32), torch.float32),
        ((torch.float32, torch.float64), torch.float64),
        ((torch.bfloat16, torch.float64), torch.float64),
    ],
)
def test_the_flat_vector_is_fp32_or_fp64_where_a_tensor_is(
    dtypes: tuple[torch.dtype, torch.dtype], expected: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=dtypes[0]), nn.Linear(2, 2, dtype=dtypes[1]))
    assert ParameterLayout.of(model).dtype is expected


def test_a_layout_of_matrices_or_of_vectors_only() -> None:
    assert ParameterLayout.of(nn.Linear(3, 2, bias=False)).num_decayed == 6
    assert ParameterLayout.of(nn.LayerNorm(4)).num_decayed == 0


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["embedding.weight"], [(0, 15)]),
        (["embedding"], [(0, 15)]),  # a module's prefix
        (["head"], [(0, 15), (22, 27)]),  # its weight is the embedding's
        (["head.bias", "norm"], [(16, 27)]),  # neighbours are one slice
        (["norm", "norm.weight", "norm"], [(16, 22)]),  # each tensor once
        (["*.weight"], [(0, 15), (16, 19)]),
        (["*"], [(0, 27)]),
        (["n?rm.[bw]*"], [(16, 22)]),
        ([], []),
    ],
)
def test_globs_and_prefixes_select_slices(
    patterns: list[str], expected: list[tuple[int, int]]
) -> None:
    assert LAYOUT.select(patterns) == tuple(slice(a, b) for a, b in expected)


def test_a_prefix_is_a_whole_module_name() -> None:
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(12))
    layout = ParameterLayout.of(nn.ModuleDict({"layers": model}))
    assert layout.select(["layers.1"]) == (slice(1, 2),)  # not layers.10 and layers.11


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("embeding", r"did you mean 'embedding'\?"),
        ("norm.wieght", r"did you mean 'norm.weight'\?"),
        ("xyz", r"allowed: "),
        ("table", r""),  # frozen: not exchanged, hence not selectable
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_with_a_hint(pattern: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"subset pattern '{pattern}' matches no tensor; {hint}"):
        LAYOUT.select(["embedding", pattern])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ReLU(), r"no trainable parameters"),
        (nn.Linear(2, 2).requires_grad_(False), r"no trainable parameters"),
        (nn.Embedding(0, 2), r"trainable parameters are all empty"),
        (nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]), r"'0' is torch.complex64"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParameterLayout.of(model)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_model_is_refused_until_it_has_seen_a_batch() -> None:
    model = nn.LazyLinear(2)
    with pytest.raises(ConfigError, match=r"parameter 'weight' has no shape yet: run one batch"):
        ParameterLayout.of(model)
    model(torch.zeros(1, 3))
    assert ParameterLayout.of(model).numel == 8


def test_fingerprints_tell_names_shapes_and_dtypes_apart() -> None:
    models = (
        nn.Linear(2, 3),
        nn.Linear(3, 2),
        nn.Linear(2, 3, bias=False),
        nn.Linear(2, 3, dtype=torch.bfloat16),
        nn.Sequential(nn.Linear(2, 3)),
    )
    prints = [ParameterLayout.of(model).fingerprint() for model in models]
    assert all(prints.count(one) == 1 for one in prints)
    assert ParameterLayout.of(nn.Linear(2, 3)).fingerprint() == prints[0]


# -------------------------------------------------------------------------- slices of flat vectors


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, tuple[slice, ...]]:
    """A length, and ascending disjoint slices of it."""
    length = draw(st.integers(0, 30))
    bounds = sorted(draw(st.lists(st.integers(0, length), max_size=8)))
    pairs = zip(bounds[::2], bounds[1::2], strict=False)
    return length, tuple(slice(start, stop) for start, stop in pairs)


@given(cuts())
def test_scatter_undoes_gather_and_touches_nothing_else(cut: tuple[int, tuple[slice, ...]]) -> None:
    length, slices = cut
    flat = torch.arange(float(length))
    taken = gather(flat, slices)
    chosen = torch.zeros(length, dtype=torch.bool)
    for piece in slices:
        chosen[piece] = True
    assert torch.equal(taken, flat[chosen])
    assert taken.is_contiguous() and (not len(taken) or taken.data_ptr() != flat.data_ptr())
    target = torch.full((length,), -1.0)
    scatter(target, slices, taken)
    assert torch.equal(target, torch.where(chosen, flat, torch.tensor(-1.0)))


@given(cuts())
def test_merging_keeps_the_elements_and_leaves_no_neighbours(
    cut: tuple[int, tuple[slice, ...]],
) -> None:
    length, slices = cut
    flat = torch.arange(float(length))
    merged = merge(slices)
    assert torch.equal(gather(flat, merged), gather(flat, slices))
    for left, right in itertools.pairwise(merged):
        assert left.stop < right.start
    assert all(piece.start < piece.stop for piece in merged)


def test_gather_of_nothing_keeps_the_type() -> None:
    nothing: Tensor = gather(torch.zeros(3, dtype=torch.float64), ())
    assert nothing.shape == (0,) and nothing.dtype is torch.float64
