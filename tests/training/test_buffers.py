"""A model's buffers: what is agreed on, what is left alone, what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gossamer.errors import ConfigError
from gossamer.training.buffers import BufferLayout


class Holder(nn.Module):
    """A buffer of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(2)
        self.register_buffer("short", torch.tensor([1.5, -2.0], dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(7, dtype=torch.int32))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("no_integers", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("turn", torch.tensor([1 + 2j, 3 - 4j]))
        self.register_buffer("absent", None)
        self.register_buffer("cache", torch.ones(4), persistent=False)
        self.register_buffer("alias", self.short)  # the same tensor: once


def stored(model: nn.Module, layout: BufferLayout) -> tuple[Tensor, Tensor]:
    floats = torch.full((layout.num_floats,), torch.nan, dtype=layout.dtype)
    integers = torch.full((layout.num_integers,), -1, dtype=torch.int64)
    layout.store(model, floats, integers)
    return floats, integers


def test_floats_and_complex_ones_go_to_one_vector_integers_and_flags_to_the_other() -> None:
    model = Holder()
    layout = BufferLayout.of(model)
    floats, integers = stored(model, layout)
    assert list(layout.floats) == [
        "short", "nothing", "turn", "inner.running_mean", "inner.running_var",
    ]  # fmt: skip
    assert floats.tolist() == [1.5, -2.0, 1.0, 2.0, 3.0, -4.0, 0.0, 0.0, 1.0, 1.0]
    assert list(layout.integers) == [
        "count", "flags", "no_integers", "inner.num_batches_tracked",
    ]  # fmt: skip
    assert integers.tolist() == [7, 1, 0, 0]


def test_loading_is_the_inverse_of_storing_and_leaves_caches_alone() -> None:
    model, other = Holder(), Holder()
    layout = BufferLayout.of(model)
    floats, integers = stored(model, layout)
    for buffer in other.buffers():
        buffer.zero_()
    BufferLayout.of(other).load(other, floats, integers)
    for name, buffer in other.state_dict().items():
        assert torch.equal(buffer, model.state_dict()[name]), name
    assert other.cache.tolist() == [0.0] * 4


def test_fp64_buffers_of_an_fp32_model_lose_nothing() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("time", torch.tensor(1.0 + 2**-40, dtype=torch.float64))
    layout = BufferLayout.of(model)
    floats, integers = stored(model, layout)
    assert floats.dtype is torch.float64
    model.time.zero_()
    layout.load(model, floats, integers)
    assert float(model.time) == 1.0 + 2**-40


def test_a_model_without_buffers_takes_no_room() -> None:
    layout = BufferLayout.of(nn.Linear(2, 2))
    assert (layout.num_floats, layout.num_integers, layout.dtype) == (0, 0, torch.float32)


def test_a_buffer_that_was_replaced_is_read_where_it_is_now() -> None:
    model = Holder()
    layout = BufferLayout.of(model)
    model.short = model.short * 2
    floats, _ = stored(model, layout)
    assert floats[:2].tolist() == [3.0, -4.0]


def test_a_batch_that_a_model_keeps_as_its_buffer_is_never_written_to() -> None:
    model = Holder()
    layout = BufferLayout.of(model)
    floats, integers = stored(model, layout)
    batch = torch.tensor([8.0, 9.0], dtype=torch.bfloat16)
    own = model.short
    model.short = batch
    layout.load(model, floats, integers)
    assert batch.tolist() == [8.0, 9.0]
    assert model.short is own and model.short.tolist() == [1.5, -2.0]


def grow(model: Holder) -> None:
    model.short = torch.zeros(3, dtype=torch.bfloat16)


def widen(model: Holder) -> None:
    model.short = model.short.float()


def remove(model: Holder) -> None:
    model.short = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (grow, r"replaced its buffer 'short', torch.bfloat16 of shape \[2\], by .* \[3\]"),
        (widen, r"replaced its buffer 'short', .* by torch.float32 of shape \[2\]"),
        (remove, r"removed its buffer 'short'"),
    ],
)
def test_a_buffer_that_changes_shape_or_type_or_goes_is_refused(
    change: Callable[[Holder], None], message: str
) -> None:
    model = Holder()
    layout = BufferLayout.of(model)
    change(model)
    with pytest.raises(ConfigError, match=message):
        stored(model, layout)
