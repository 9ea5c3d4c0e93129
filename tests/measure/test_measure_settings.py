"""When measurements are due."""

from __future__ import annotations

import pytest

from gossamer.errors import ConfigError
from gossamer.measure.settings import Measure


def due(every: int, num_rounds: int) -> list[int]:
    measure = Measure(every=every)
    return [r for r in range(num_rounds + 1) if measure.due(r, num_rounds)]


def test_due_after_every_so_many_rounds_and_at_the_end() -> None:
    assert due(10, 25) == [10, 20, 25]
    assert due(5, 10) == [5, 10]
    assert due(1, 3) == [1, 2, 3]
    assert due(0, 7) == [7]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match="every"):
        Measure(every=-1)
