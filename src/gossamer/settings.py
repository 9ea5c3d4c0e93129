"""The base of everything a user can set: frozen, strict, and clear when it refuses.

Recipe sections, hyperparameters of methods, network and fault plans are all `Settings`. A wrong
value or an unknown name raises `ConfigError` when the object is built, never later.
"""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from gossamer.errors import ConfigError, nearest

_SHOWN_MAX = 80  # characters of what was given

# Words of people who write TOML for what pydantic says in those of Python.
_EXPECTED = {
    "tuple_type": "a list expected, such as [1, 2]",
    "model_type": "a table expected, such as {key = 1}",
}


class Settings(BaseModel):
    """Frozen keyword-only settings; unknown names and wrong types are a `ConfigError`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, strict=False
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, type(self))) from None

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            if bool not in kinds and (int in kinds or float in kinds):
                raise ValueError(f"a number expected; got {value!r}")
        return value


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first fault of a pydantic error as one line: where, what was given, what is allowed.

    Args:
        prefix: dotted key of the whole that was refused; "" where it has none.
    """
    fault = error.errors()[0]
    loc = [str(part) for part in fault["loc"]]
    where = ".".join([prefix, *loc] if prefix else loc)
    if fault["type"] == "extra_forbidden":
        return f"unknown setting {where!r}; {nearest(loc[-1], _names_at(loc[:-1], model))}"
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message[:1].lower() + message[1:] if message[1:2].islower() else message
    message = _EXPECTED.get(fault["type"], message)
    # What a table within, or a check over several settings, says begins with the setting's name.
    name, colon, rest = message.partition(": ")
    if colon and name.split(".")[0] in _names_at(loc, model):
        where, message = f"{where}.{name}".removeprefix("."), rest
    return f"{where}: {message}{_given(fault)}" if where else f"{message}{_given(fault)}"


def _given(fault: Any) -> str:
    """What was given, where the message does not speak of it: only our own checks do."""
    if fault["type"] in ("missing", "value_error", "assertion_error"):
        return ""
    text = repr(fault.get("input"))
    return f"; got {text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + '...'}"


def _names_at(loc: list[str], model: type[BaseModel]) -> list[str]:
    """Names of the settings of what lies at `loc`; none where it is no table."""
    current: type[BaseModel] | None = model
    for part in loc:
        if part.isdigit():
            continue  # an element of a list, whose kind was found at its name
        field = current.model_fields.get(part) if current is not None else None
        kinds = _kinds(field.annotation) if field is not None else []
        tables = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        current = tables[0] if tables else None
    return list(current.model_fields) if current is not None else []


def _kinds(annotation: object) -> list[object]:
    """A type, and all that it is made of: `tuple[int, ...] | None` has int and None."""
    return [annotation, *(kind for part in get_args(annotation) for kind in _kinds(part))]
