"""From a recipe to the parts of a cluster run: its job, its coordinator, its certificates."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.cluster.job import DEADLINE_S, Job
from gossamer.config import Recipe

if TYPE_CHECKING:
    from gossamer.cluster.certs import Credentials
    from gossamer.cluster.plan import CoordinatorSettings


def job_of(recipe: Recipe) -> Job:
    """What all processes of the run must agree on. Raises `ConfigError` for unusable data."""
    deadline_s = recipe.network.deadline
    return Job(
        method=recipe.method,
        task=recipe.task.build(recipe.train),
        training=recipe.train,
        seed=recipe.seed,
        deadline_s=DEADLINE_S if deadline_s is None else deadline_s,
        keepalive_s=recipe.network.keepalive,
        step_time_s=recipe.timing.step_time if recipe.cluster.pace else 0.0,
        rejoin_moments=recipe.cluster.rejoin_moments,
        checkpoint_every=recipe.cluster.checkpoint_every,
        about_task=_about_task(recipe),
    )


def _about_task(recipe: Recipe) -> dict[str, Any]:
    """The task's settings; files of one's own by their content, as they may lie elsewhere."""
    about = recipe.task.model_dump(mode="json")
    for name, paths in recipe.task.files().items():
        digests = []
        for path in paths:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        about[name] = "sha256:" + "+".join(digests)
    return about


def coordinator_of(
    recipe: Recipe,
    configuration: dict[str, Any],
    *,
    store: Path,
    listen: str | None = None,
    run_id: str | None = None,
) -> CoordinatorSettings:
    """What the coordinator of a recipe is told.

    Args:
        configuration: the job's, which every worker's must equal.
        store: the SQLite file of the run.
        listen: HOST:PORT; None: the recipe's.
        run_id: of a run to go on with from its workers' checkpoints.
    """
    from gossamer.cluster.plan import CoordinatorSettings

    cluster = recipe.cluster
    return CoordinatorSettings(
        listen=listen or cluster.coordinator,
        store=store,
        workers=recipe.train.workers,
        syncers=recipe.method.num_syncers,
        rounds=recipe.train.rounds,
        deadline=configuration["deadline_s"],
        min_workers=cluster.min_workers,
        start_timeout=cluster.start_timeout,
        joiners_per_donor=cluster.joiners_per_donor,
        configuration=configuration,
        run_id=run_id,
    )


def credentials_of(folder: Path | str | None, name: str) -> Credentials | None:
    """The certificate of `name` in a folder made by `gossamer certs`; None where there is none.

    Raises `ConfigError`.
    """
    if folder is None:
        return None
    from gossamer.cluster.certs import Credentials

    return Credentials.load(folder, name)
