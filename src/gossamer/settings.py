"""The base of everything a user can set: frozen, strict, and clear when it refuses.

Recipe sections, hyperparameters of methods, network and fault plans are all `Settings`. A wrong
value or an unknown name raises `ConfigError` when the object is built, never later.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from gossamer.errors import ConfigError, nearest


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


def explain(error: ValidationError, model: type[BaseModel], prefix: str = "") -> str:
    """The first fault of a pydantic error as one line: where, what was given, what is allowed."""
    fault = error.errors()[0]
    where = prefix + ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        hint = nearest(str(fault["loc"][-1]), _names_at(fault["loc"], model))
        return f"unknown setting {where!r}; {hint}"
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = message[:1].lower() + message[1:] if message[1:2].islower() else message
    given = fault.get("input")
    shown = "" if isinstance(given, dict) or repr(given) in message else f"; got {given!r}"
    return f"{where}: {message}{shown}" if where else f"{message}{shown}"


def _names_at(loc: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """Names allowed at the level where an unknown one was given."""
    current: type[BaseModel] = model
    for part in loc[:-1]:
        field = current.model_fields.get(str(part))
        nested = field.annotation if field is not None else None
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            current = nested
    return list(current.model_fields)
