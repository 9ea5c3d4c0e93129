"""What a run was planned to be, and the small words of its membership."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from gossamer.cluster.messages import Role
from gossamer.errors import ConfigError
from gossamer.settings import Settings
from gossamer.units import Duration


@dataclass(frozen=True)
class Plan:
    """What the run was planned to be.

    Workers have the indices 0 .. num_workers - 1, syncers those that follow.
    """

    num_workers: int
    num_rounds: int
    deadline_s: float
    num_syncers: int = 0
    min_workers: int | None = None  # enough to begin with after `start_timeout_s`; None: all
    start_timeout_s: float = 0.0
    joiners_per_donor: int = 2

    def role_of(self, index: int) -> Role:
        """What the process with this index does."""
        return "worker" if index < self.num_workers else "syncer"


class Refused(Exception):
    """An event that is not accepted; `code` as in the `Refusal` message."""

    def __init__(self, code: str, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.code, self.permanent = code, permanent


class Ping(NamedTuple):
    """Dial this worker, and report with `pinged`."""

    worker: int
    incarnation: int
    address: str


class CoordinatorSettings(Settings):
    """What a coordinator is told at its start."""

    listen: str = Field(default="127.0.0.1:0", description="HOST:PORT; port 0: any that is free")
    store: Path = Field(description="the SQLite file that holds the run")
    workers: int = Field(ge=1, le=4096, description="workers that the run was planned for")
    syncers: int = Field(default=0, ge=0, le=64, description="syncers besides them")
    rounds: int = Field(ge=1, description="rounds of the run")
    deadline: Duration = Field(gt=0, description="a worker without progress for so long is lost")
    min_workers: int | None = Field(
        default=None, ge=1, description="enough to begin with after `start_timeout`; all if not set"
    )
    start_timeout: Duration = Field(
        default=60.0, ge=0, description="how long to wait for more than `min_workers`"
    )
    joiners_per_donor: int = Field(
        default=2, ge=1, description="workers that take a state from the same donor at a time"
    )
    configuration: dict[str, Any] = Field(
        description="JSON document that every worker's must equal"
    )
    run_id: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{32}$",
        description="run to go on with from its workers' checkpoints where the store is new",
    )

    def plan(self) -> Plan:
        """As the membership needs it. Raises `ConfigError`."""
        if self.min_workers is not None and self.min_workers > self.workers:
            raise ConfigError(
                f"min_workers is at most workers ({self.workers}), got {self.min_workers}"
            )
        return Plan(
            num_workers=self.workers,
            num_rounds=self.rounds,
            deadline_s=self.deadline,
            num_syncers=self.syncers,
            min_workers=self.min_workers,
            start_timeout_s=self.start_timeout,
            joiners_per_donor=self.joiners_per_donor,
        )

    def identity(self) -> dict[str, Any]:
        """What must stay the same when a coordinator goes on with a stored run."""
        return {
            "workers": self.workers,
            "syncers": self.syncers,
            "rounds": self.rounds,
            "configuration": self.configuration,
        }
