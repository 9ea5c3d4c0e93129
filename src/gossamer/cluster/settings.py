"""The recipe's `[cluster]` section: how a run between real processes is carried out."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from gossamer.cluster.addresses import split_address
from gossamer.comm.donation import Moments
from gossamer.settings import Settings
from gossamer.units import Duration, Rate


class ClusterSettings(Settings):
    """The real world, where `[network]` and `[timing]` describe the simulated one.

    A cluster run takes from those only `network.deadline`, `network.keepalive`, and
    `timing.step_time` with `pace`; the rest is refused.
    """

    coordinator: str = Field(
        default="127.0.0.1:0",
        description="HOST:PORT where the coordinator listens and the workers find it; port 0 (any "
        "free one) is for `launch` only",
    )
    listen: str = Field(
        default="127.0.0.1:0", description="HOST:PORT where a worker listens; port 0: any free one"
    )
    certificates: str | None = Field(
        default=None,
        description="folder made by `gossamer certs`; left out: plain text, on loopback only",
    )
    rate: Rate | None = Field(
        default=None, gt=0,
        description="bytes per second each way of every worker, to play a thin line; left out: as "
        "fast as it goes",
    )  # fmt: skip
    delay: Duration = Field(default=0.0, ge=0, description="one-way delay to play")
    pace: bool = Field(
        default=False,
        description="make each inner step take at least timing.step_time, to play a larger model",
    )
    checkpoint_every: int = Field(
        default=1, ge=0, description="rounds between a worker's checkpoints; 0: none"
    )
    rejoin_moments: Moments = Field(
        default="donor", description="whose inner moments a worker that comes back goes on with"
    )
    min_workers: int | None = Field(
        default=None, ge=1, description="enough to begin with after `start_timeout`; left out: all"
    )
    start_timeout: Duration = Field(
        default=60.0, ge=0, description="how long to wait for more than `min_workers`"
    )
    joiners_per_donor: int = Field(
        default=2, ge=1, description="workers that take a state from the same donor at a time"
    )
    restarts: int = Field(
        default=5, ge=0, description="how often `launch` starts a worker again that has died"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        split_address(self.coordinator)
        split_address(self.listen)
        default = type(self).model_fields["start_timeout"].default
        if self.min_workers is None and self.start_timeout != default:
            raise ValueError(
                f"start_timeout: {self.start_timeout:g} s would be ignored, as without min_workers "
                f"all are waited for; set min_workers too, or leave it out"
            )
        return self

    def located(self, base: Path) -> ClusterSettings:
        """The same with `certificates` as an absolute path, where it is below `base` or the cwd."""
        for folder in (base, Path.cwd()):
            if self.certificates is not None and (folder / self.certificates).is_dir():
                path = str((folder / self.certificates).resolve())
                return self.model_copy(update={"certificates": path})
        return self
