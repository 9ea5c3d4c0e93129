"""Which fragment is synchronised at which step."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """When each fragment is due: at the global steps t = 1, 2, ... with t mod period = its offset.

    Offsets are distinct and evenly spread over 0 .. period - 1, so each fragment is due once in a
    period, and with as many fragments as steps exactly one is at each step. A single fragment is
    due at the end of each period.

    Raises `ConfigError` where there are more fragments than steps.
    """

    num_fragments: int
    period: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_fragments <= self.period:
            raise ConfigError(
                f"fragments: from 1 to as many as the {self.period} steps of a cycle; "
                f"got {self.num_fragments}"
            )

    def offset(self, fragment: int) -> int:
        """t_p, in 0 .. period - 1."""
        return fragment * self.period // self.num_fragments

    def due(self, step: int) -> int | None:
        """The fragment that is due at a global step; None: none is, or `step` is below 1."""
        place = step % self.period
        nearest = -(-place * self.num_fragments // self.period)
        is_due = step > 0 and nearest < self.num_fragments and self.offset(nearest) == place
        return nearest if is_due else None

    def steps_since(self, fragment: int, step: int) -> int:
        """Steps from when the fragment was last due, or would have been, to `step`."""
        return (step - self.offset(fragment)) % self.period
