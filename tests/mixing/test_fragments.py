"""Fragments: a partition of the tensors, deterministic, and packed as well as theory promises."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import ConfigError
from gossamer.mixing.fragments import Fragment, Scheme, fragments_of, most_fragments
from gossamer.training.layout import ParameterLayout, Slot, gather, scatter

SCHEMES: tuple[Scheme, ...] = ("balanced", "layer", "strided")


def layout_of(sizes: dict[str, int]) -> ParameterLayout:
    slots, offset = [], 0
    for name, size in sizes.items():
        slots.append(Slot(name, (size,), offset, torch.float32, decay=True))
        offset += size
    return ParameterLayout(tuple(slots))


def tensors(sizes: list[int]) -> ParameterLayout:
    return layout_of({f"t{index:03d}": size for index, size in enumerate(sizes)})


def model(num_layers: int = 5) -> ParameterLayout:
    sizes = {"embedding.weight": 700}
    for layer in range(num_layers):
        sizes |= {f"layers.{layer}.{part}": n for part, n in (("wq", 40), ("wo", 41), ("mlp", 90))}
    return layout_of(sizes | {"head.weight": 650, "norm.weight": 8})


def best_peak(sizes: list[int], count: int) -> int:
    """The least possible size of the largest fragment, by trying everything."""
    return min(
        max(
            sum(s for s, g in zip(sizes, where, strict=True) if g == group)
            for group in range(count)
        )
        for where in itertools.product(range(count), repeat=len(sizes))
    )


def check_partition(layout: ParameterLayout, fragments: tuple[Fragment, ...]) -> None:
    named = [name for fragment in fragments for name in fragment.names]
    assert sorted(named) == sorted(layout.names) and len(named) == len(layout.names)
    flat = torch.arange(layout.numel, dtype=torch.float32)
    back = torch.full_like(flat, -1)
    for index, fragment in enumerate(fragments):
        assert fragment.index == index and fragment.names
        values = gather(flat, fragment.slices)
        assert len(values) == fragment.numel
        # Each tensor lies where it says.
        by_name = layout.views(flat)
        for name, piece in zip(fragment.names, fragment.tensors, strict=True):
            assert torch.equal(values[piece], by_name[name].reshape(-1))
        scatter(back, fragment.slices, values)
    assert torch.equal(back, flat)


@given(
    sizes=st.lists(st.integers(1, 10_000), min_size=1, max_size=40),
    count=st.integers(1, 12),
    order=st.randoms(use_true_random=False),
)
def test_balanced_is_a_deterministic_partition_near_the_bound(
    sizes: list[int], count: int, order: object
) -> None:
    count = min(count, len(sizes))
    layout = tensors(sizes)
    fragments = fragments_of(layout, count)
    check_partition(layout, fragments)
    peak, mean = max(f.numel for f in fragments), sum(sizes) / count
    # Greedy: the heaviest was the lightest before its last tensor came.
    assert peak <= mean + (1 - 1 / count) * max(sizes)
    if max(sizes) <= mean / 3:
        assert peak <= 4 / 3 * mean
    # The same tensors in another order of the flat vector: the same fragments.
    names = [(slot.name, slot.numel) for slot in layout.slots]
    order.shuffle(names)  # type: ignore[attr-defined]
    again = fragments_of(layout_of(dict(names)), count)
    assert [sorted(f.names) for f in again] == [sorted(f.names) for f in fragments]


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=7), count=st.integers(1, 3))
def test_balanced_is_within_four_thirds_of_the_best_possible(sizes: list[int], count: int) -> None:
    count = min(count, len(sizes))
    peak = max(f.numel for f in fragments_of(tensors(sizes), count))
    assert peak <= (4 / 3 - 1 / (3 * count)) * best_peak(sizes, count) + 1e-9


def test_the_bound_on_the_mean_alone_is_not_a_theorem() -> None:
    """Four equal tensors in three fragments: 2 is the best possible, and 3/2 of the mean."""
    assert max(f.numel for f in fragments_of(tensors([5, 5, 5, 5]), 3)) == 10
    assert best_peak([5, 5, 5, 5], 3) == 10


def test_graham_s_worst_case() -> None:
    sizes = [5, 5, 4, 4, 3, 3, 3]
    assert max(f.numel for f in fragments_of(tensors(sizes), 3)) == 11
    assert best_peak(sizes, 3) == 9


def test_equal_tensors_are_taken_by_name() -> None:
    layout = layout_of({"c": 4, "a": 4, "b": 4})
    assert [f.names for f in fragments_of(layout, 3)] == [("a",), ("b",), ("c",)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("own", [(), ("embedding",), ("embedding", "head")])
def test_every_scheme_is_a_partition(scheme: Scheme, own: tuple[str, ...]) -> None:
    layout = model()
    most = most_fragments(layout, scheme=scheme, own=own)
    for count in range(1 + bool(own), most + 1):
        fragments = fragments_of(layout, count, scheme=scheme, own=own)
        assert len(fragments) == count
        check_partition(layout, fragments)
        if own:
            assert {name.split(".")[0] for name in fragments[0].names} == set(own)
    for wrong in (0, most + 1, *([1] if own else [])):
        with pytest.raises(ConfigError, match="fragments"):
            fragments_of(layout, wrong, scheme=scheme, own=own)


def test_layers_are_neighbours_or_strided() -> None:
    layout = model(num_layers=4)  # embedding, 4 layers, head, norm: 7 blocks

    def layers(scheme: Scheme) -> list[set[str]]:
        fragments = fragments_of(layout, 3, scheme=scheme, own=("embedding", "head", "norm"))
        return [{".".join(n.split(".")[:2]) for n in f.names} for f in fragments[1:]]

    assert layers("layer") == [{"layers.0", "layers.1"}, {"layers.2", "layers.3"}]
    assert layers("strided") == [{"layers.0", "layers.2"}, {"layers.1", "layers.3"}]


def test_all_tensors_apart_are_one_fragment() -> None:
    layout = layout_of({"embedding.weight": 3, "embedding.bias": 1})
    (only,) = fragments_of(layout, 1, own=("embedding",))
    assert only.numel == 4


def test_empty_tensors_have_a_home() -> None:
    layout = layout_of({"a": 0, "b": 0, "c": 5})
    check_partition(layout, fragments_of(layout, 3))
