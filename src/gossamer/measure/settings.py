"""What is measured during a run: the recipe's `[measure]` section."""

from __future__ import annotations

from pydantic import Field

from gossamer.settings import Settings


class Measure(Settings):
    """Measurements cost evaluation time on this machine, never simulated time."""

    every: int = Field(
        10, ge=0, description="rounds between evaluations of the averaged model; 0: only at the end"
    )
    workers: bool = Field(False, description="at each of them evaluate every worker's model too")
    inner_consensus: bool = Field(
        False, description="also the L2 consensus at the end of the inner steps"
    )

    def due(self, rounds_completed: int, num_rounds: int) -> bool:
        """Whether to measure after this many completed rounds; always after the last."""
        if rounds_completed == num_rounds:
            return True
        return self.every > 0 and rounds_completed > 0 and rounds_completed % self.every == 0
