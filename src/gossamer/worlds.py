"""Settings that only one of the two worlds reads, refused in the other: nothing is ignored."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from gossamer.errors import ConfigError
from gossamer.settings import Settings

if TYPE_CHECKING:
    from gossamer.config import Recipe

# Of a recipe's network, what holds between real machines too.
_REAL_NETWORK = ("deadline", "keepalive")


def refuse_simulated(recipe: Recipe) -> None:
    """Raise `ConfigError` where a recipe for the cluster world says what only a simulator does."""
    named = [
        *_given(recipe.network, "network", but=_REAL_NETWORK),
        *_given(recipe.timing, "timing", but=("step_time",) if recipe.cluster.pace else ()),
        *(["[faults]"] if _given(recipe.faults, "faults") else []),
        *_given(recipe.measure, "measure", but=("every", "workers")),
        *_given(recipe.run, "run", but=("world", "threads")),
    ]
    if named:
        are = "is" if len(named) == 1 else "are"
        raise ConfigError(
            f"{_listed(named)} {are} for the simulated world, and would be ignored between real "
            f'processes; leave out what is, or set run.world = "sim"{_instead(named)}'
        )
    moments = recipe.cluster.rejoin_moments
    if recipe.method.moments_are_shared and moments != "donor":
        raise ConfigError(
            f"cluster.rejoin_moments: {moments!r} would be ignored, as with {recipe.method.name} "
            f'all workers have the same moments; leave it out, or "donor"'
        )


def refuse_measuring(recipe: Recipe) -> None:
    """Raise `ConfigError` where processes that are started one by one are to measure."""
    if recipe.measure.workers or recipe.measure.every not in (0, _default(recipe.measure, "every")):
        raise ConfigError(
            "[measure]: only `gossamer launch`, which has all workers' checkpoints in one folder, "
            "measures a cluster run; leave the section out, and export the averaged model"
        )


def refuse_unmeasurable(recipe: Recipe) -> None:
    """Raise `ConfigError` where rounds are to be measured that leave no checkpoint."""
    measured, saved = recipe.measure.every, recipe.cluster.checkpoint_every
    if measured and (not saved or measured % saved):
        raise ConfigError(
            f"measure.every: rounds are measured from the workers' checkpoints, and "
            f"cluster.checkpoint_every = {saved} leaves none of every {measured}th round; make it "
            f"a divisor of {measured}, or measure.every = 0 (only at the end)"
        )


def _given(section: Settings, name: str, *, but: Collection[str] = ()) -> list[str]:
    """Dotted keys that differ from their defaults."""
    return [
        f"{name}.{key}"
        for key in type(section).model_fields
        if key not in but and getattr(section, key) != _default(section, key)
    ]


def _default(section: Settings, key: str) -> object:
    return type(section).model_fields[key].get_default(call_default_factory=True)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


_INSTEAD = {
    "network.bandwidth": "cluster.rate plays a thin line",
    "network.latency": "cluster.delay plays a long one",
    "timing.step_time": "cluster.pace = true makes steps last so long",
    "run.checkpoint_every": "cluster.checkpoint_every is the workers' own",
}


def _instead(named: Sequence[str]) -> str:
    found = [_INSTEAD[name] for name in named if name in _INSTEAD]
    return f" ({'; '.join(found)})" if found else ""
