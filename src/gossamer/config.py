"""Recipes: whole runs as TOML, read into strict settings and written back as they were understood.

A recipe is refused as a whole and early: `load_recipe` finds every fault of spelling and value,
`prepare` those that need the model and the data. Neither makes a file.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import tomli_w
import torch
from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny, ValidationError

from gossamer.cluster.settings import ClusterSettings
from gossamer.errors import ConfigError, nearest
from gossamer.measure.settings import Measure
from gossamer.methods import METHODS, PRESETS, Method
from gossamer.methods.base import training_of
from gossamer.settings import Settings, explain
from gossamer.sim.compute import Timing
from gossamer.sim.faults import FaultPlan, Faults
from gossamer.sim.network import Network
from gossamer.training.layout import ParameterLayout
from gossamer.training.settings import Training
from gossamer.training.task import Prepares, Task
from gossamer.training.task_settings import TaskSettings, TextSettings
from gossamer.training.tasks import TASKS
from gossamer.worlds import refuse_simulated

S = TypeVar("S", bound=Settings)


class RunSettings(Settings):
    """`[run]`: in which world, and how it is kept."""

    world: Literal["sim", "cluster"] = Field(
        "sim", description="where the workers live: simulated in one process, or each in its own"
    )
    numerics: Literal["real", "none"] = Field(
        "real", description='"none": tensors on the meta device, only time passes'
    )
    checkpoint_every: int = Field(
        0, ge=0, description="rounds, of a simulated run; 0 for only when stopped"
    )
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="torch threads; default: torch's choice, and 1 per `launch` worker",
    )


def parse_method(values: object) -> Method:
    """A `Method` from a recipe's `[method]` table; a preset's settings are defaults under it."""
    if isinstance(values, Method):
        return values
    table = _table(values, "method")
    known = [*METHODS, *PRESETS]
    name = table.pop("name", None)
    if name is None:
        raise ConfigError(f"method.name is missing; allowed: {', '.join(known)}")
    if name not in known:
        raise ConfigError(f"method.name: unknown method {name!r}; {nearest(str(name), known)}")
    base, preset = PRESETS.get(name, (name, {}))
    kind = METHODS[base]
    settings = {**preset, **table}
    for key, value in settings.items():
        if isinstance(value, str) and key in kind.model_fields and _holds_list(kind, key):
            settings[key] = value.split("+")
    return _section(kind, settings, "method")


def parse_task(values: object) -> TaskSettings:
    """Task settings from a recipe's `[task]` table; the kind is chosen by its `name`."""
    if isinstance(values, TaskSettings):
        return values
    table = _table(values, "task")
    name = table.get("name", "text")
    if not isinstance(name, str) or name not in TASKS:
        raise ConfigError(f"task.name: unknown task {name!r}; {nearest(str(name), TASKS)}")
    return _section(TASKS[name], table, "task")


class Recipe(Settings):
    """A whole run."""

    seed: int = Field(0, ge=0, lt=2**63, description="fixes everything random")
    task: Annotated[SerializeAsAny[TaskSettings], BeforeValidator(parse_task)] = Field(
        default_factory=TextSettings, description="what is learned"
    )
    train: Training = Field(default_factory=Training, description="inner training")
    method: Annotated[SerializeAsAny[Method], BeforeValidator(parse_method)] = Field(
        description="how the workers agree"
    )
    network: Network = Field(default_factory=Network, description="the links")
    timing: Timing = Field(default_factory=Timing, description="modelled compute and payload")
    faults: Faults = Field(default_factory=Faults, description="what goes wrong")
    measure: Measure = Field(default_factory=Measure, description="what is measured, and when")
    cluster: ClusterSettings = Field(
        default_factory=ClusterSettings, description="how a run between real processes is done"
    )
    run: RunSettings = Field(default_factory=RunSettings, description="world and housekeeping")


_SECTIONS: dict[str, type[Settings]] = {
    "train": Training,
    "network": Network,
    "timing": Timing,
    "faults": Faults,
    "measure": Measure,
    "cluster": ClusterSettings,
    "run": RunSettings,
}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A recipe that is known to be runnable, with the objects that were built to find out."""

    recipe: Recipe
    task: Task
    layout: ParameterLayout


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a TOML recipe, with `key.key=value` overrides applied to it.

    Relative data paths are looked for in the recipe's folder, then in the working directory.
    Raises `ConfigError` for a missing file, bad TOML, an unknown key or a wrong value.
    """
    return build_recipe(apply_overrides(read_toml(path), overrides), base=path.parent)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dict. Raises `ConfigError` naming the file, and the line where it fails."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no recipe {str(path)!r}; {_recipes_near(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read recipe {str(path)!r}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"recipe {str(path)!r} is not valid TOML: {error}") from None


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`values` with each `key.key=value` set; tables on the way are made where missing."""
    result = {k: dict(v) if isinstance(v, dict) else v for k, v in values.items()}
    for text in overrides:
        dotted, equals, literal = text.partition("=")
        keys = [key.strip() for key in dotted.split(".")]
        if not equals or not all(keys):
            raise ConfigError(f"--set {text!r}: KEY=VALUE expected, such as train.workers=4")
        table = result
        for depth, key in enumerate(keys[:-1], start=1):
            inner = table.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {text!r}: {'.'.join(keys[:depth])} is not a table")
            table = inner
        table[keys[-1]] = parse_value(literal)
    return result


def parse_value(text: str) -> Any:
    """A TOML literal (number, boolean, quoted string, array, inline table), else a plain string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    simple = list(parsed) == ["value"] and isinstance(value, bool | int | float | str | list | dict)
    return value if simple else text


def build_recipe(values: Mapping[str, Any], *, base: Path) -> Recipe:
    """A recipe from nested tables. Raises `ConfigError` naming the dotted key at fault."""
    _refuse_unknown_keys(values)
    if "method" not in values:
        raise ConfigError(
            'the recipe has no [method]; add one, such as [method] with name = "diloco" '
            f"(allowed: {', '.join([*METHODS, *PRESETS])})"
        )
    sections: dict[str, Any] = {
        name: _section(kind, _table(values[name], name), name)
        for name, kind in _SECTIONS.items()
        if name in values
    }
    sections["method"] = parse_method(values["method"])
    sections["task"] = parse_task(values.get("task", {})).located(base)
    if "cluster" in sections:
        sections["cluster"] = sections["cluster"].located(base)
    if "seed" in values:
        sections["seed"] = values["seed"]
    return Recipe(**sections)


def prepare(recipe: Recipe) -> Prepared:
    """Build all that can be found wrong before a run: task, model (on meta), plans, data shards.

    Raises `ConfigError`; leaves nothing behind.
    """
    workers = recipe.train.workers
    training_of(recipe.method, recipe.train)  # refuses what the method would ignore
    task = recipe.task.build(recipe.train)
    with torch.device("meta"):
        layout = ParameterLayout.of(task.build())
    recipe.method.validate_for(layout, workers)
    places = workers + recipe.method.num_syncers
    recipe.network.validate_for(places)
    recipe.timing.validate_for(workers)
    reason = recipe.method.needs_numerics()
    if recipe.run.numerics == "none" and reason is not None:
        raise ConfigError(f'run.numerics = "none" does not suit {recipe.method.name}: {reason}')
    if recipe.run.numerics == "none" and recipe.run.checkpoint_every:
        raise ConfigError(
            'run.checkpoint_every: with run.numerics = "none" there is nothing to save'
        )
    if recipe.method.num_syncers and recipe.run.checkpoint_every:
        raise ConfigError(
            f"run.checkpoint_every: a simulated run of {recipe.method.name}, which has a syncer, "
            "cannot be saved yet; leave it out"
        )
    if recipe.run.numerics == "real" and isinstance(task, Prepares):
        num_steps = recipe.train.rounds * recipe.method.inner_steps
        task.prepare(num_workers=workers, seed=recipe.seed, num_steps=num_steps)
    FaultPlan(recipe.faults, places, recipe.seed)  # refuses faults of workers that are not there
    if recipe.run.world == "cluster":
        refuse_simulated(recipe)
    return Prepared(recipe, task, layout)


def recipe_tables(recipe: Recipe) -> dict[str, Any]:
    """A recipe as nested tables that `build_recipe` reads back to an equal one."""
    tables = {"seed": recipe.seed, "task": recipe.task.model_dump(exclude_none=True)}
    train = training_of(recipe.method, recipe.train)
    tables["train"] = train.model_dump(exclude_none=True)
    method = recipe.method.model_dump(exclude_none=True)
    tables["method"] = {"name": recipe.method.name, **method}
    for name in ("network", "timing", "faults", "measure", "cluster", "run"):
        tables[name] = getattr(recipe, name).model_dump(exclude_none=True)
    return tables


def dump_recipe(recipe: Recipe) -> str:
    """TOML of every setting, defaults included; loads back equal."""
    note = "# Every setting of the run, as it was understood. Plain numbers: seconds, bytes/s.\n\n"
    return note + tomli_w.dumps(recipe_tables(recipe))


def variant(recipe: Recipe, text: str) -> Recipe:
    """`recipe` with another method, written NAME or NAME:key=value,key=value.

    The hyperparameters that methods share (inner steps, outer learning rate, outer momentum) come
    from the recipe where the new method has them, then a preset's own settings, then those
    written. Lists are joined by "+": mix2_subset=embedding+head.
    """
    name, _, written = text.partition(":")
    known = [*METHODS, *PRESETS]
    if name not in known:
        raise ConfigError(f"--method {text!r}: unknown method {name!r}; {nearest(name, known)}")
    kind = METHODS[PRESETS[name][0] if name in PRESETS else name]
    preset = PRESETS[name][1] if name in PRESETS else {}
    shared = {
        key: getattr(recipe.method, key)
        for key in type(recipe.method).model_fields
        if _is_shared(type(recipe.method), key) and _is_shared(kind, key)
    }
    given: dict[str, Any] = {}
    for pair in filter(None, _split_outside_brackets(written)):
        key, equals, literal = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--method {text!r}: NAME:key=value,key=value expected; got {pair!r}")
        given[key.strip()] = parse_value(literal)
    _refuse_unknown_method_keys(name, kind, given)
    method = parse_method({"name": name, **shared, **preset, **given})
    return recipe.model_copy(update={"method": method})


def first_difference(old: Recipe, new: Recipe, *, ignore: Sequence[str] = ()) -> str | None:
    """The first dotted key in which two recipes differ, with both values; None where equal.

    Keys that match one of the globs in `ignore` may differ.
    """
    before, after = dict(_flat(recipe_tables(old))), dict(_flat(recipe_tables(new)))
    for key in dict.fromkeys([*before, *after]):
        ignored = any(fnmatch.fnmatchcase(key, pattern) for pattern in ignore)
        if not ignored and before.get(key) != after.get(key):
            return f"{key} was {before.get(key)!r}, now {after.get(key)!r}"
    return None


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _section(kind: type[S], values: dict[str, Any], name: str) -> S:
    """`kind(**values)`, where an error names the dotted key."""
    instance = kind.__new__(kind)
    try:
        BaseModel.__init__(instance, **values)
    except ValidationError as error:
        raise ConfigError(explain(error, kind, prefix=name)) from None
    return instance


def _table(values: object, name: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}: a table expected, [{name}]; got {values!r}")
    return dict(values)


def _refuse_unknown_keys(values: Mapping[str, Any]) -> None:
    """Unknown keys of the top level and of the sections; deeper ones are pydantic's to find."""
    known: dict[str, list[str]] = {"seed": []}
    known["task"] = list(TASKS.get(_name_in(values, "task"), TextSettings).model_fields)
    known |= {name: list(kind.model_fields) for name, kind in _SECTIONS.items()}
    method_name = _name_in(values, "method")
    kind = METHODS.get(PRESETS.get(method_name, (method_name, {}))[0])
    known["method"] = ["name", *kind.model_fields] if kind is not None else []
    for name, section in values.items():
        if name not in known:
            raise ConfigError(_unknown(name, known, known))
        if not isinstance(section, Mapping) or (name == "method" and kind is None):
            continue  # refused later: no table, or an unknown method
        for key in section:
            if key not in known[name]:
                raise ConfigError(_unknown(f"{name}.{key}", known[name], known))


def _refuse_unknown_method_keys(name: str, kind: type[Method], given: Mapping[str, Any]) -> None:
    for key in given:
        if key not in kind.model_fields:
            hint = nearest(key, kind.model_fields)
            raise ConfigError(f"--method {name}: unknown setting {key!r}; {hint}")


def _name_in(values: Mapping[str, Any], section: str) -> str:
    table = values.get(section)
    return str(table.get("name", "text")) if isinstance(table, Mapping) else "text"


def _unknown(key: str, siblings: Iterable[str], known: Mapping[str, Sequence[str]]) -> str:
    """The refusal of an unknown key: the same name in another section, else the nearest sibling."""
    section, dot, last = key.rpartition(".")
    homes = [name for name, keys in known.items() if last in keys]
    if homes:
        return f"{key}: unknown setting; did you mean '{homes[0]}.{last}'?"
    hint = nearest(last, siblings).replace("did you mean '", f"did you mean '{section}{dot}")
    return f"{key}: unknown setting; {hint}"


def _is_shared(kind: type[Method], key: str) -> bool:
    field = kind.model_fields.get(key)
    extra = field.json_schema_extra if field is not None else None
    return isinstance(extra, dict) and extra.get("shared") is True


def _holds_list(kind: type[Method], key: str) -> bool:
    """Whether a hyperparameter is a list or tuple, or may be one."""
    annotation = kind.model_fields[key].annotation
    options = [annotation, *get_args(annotation)]
    return any(get_origin(option) in (list, tuple, Sequence) for option in options)


def _split_outside_brackets(text: str) -> list[str]:
    """Split at commas that stand in no brackets and no quotes."""
    pieces, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        if character == "," and depth == 0 and not quote:
            pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def _recipes_near(path: Path) -> str:
    found = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    if not found:
        return "give the path of a TOML file"
    return nearest(path.name, found)
