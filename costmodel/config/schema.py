"""Decodes plain data (read from YAML or JSON) to frozen dataclasses and checks every key and type."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from costmodel.errors import UserError

T = TypeVar("T")

_RULES = {  # by pydantic's name of the error
    "bool_type": "must be of type bool",
    "dataclass_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping",
    "float_type": "must be of type float",
    "int_type": "must be of type int",
    "literal_error": "must be one of {expected}",
    "missing": "must have more items",
    "string_type": "must be of type str",
    "too_long": "must have at most {max_length} items",
    "tuple_type": "must be a list",
}


def decode(kind: type[T], data: object, where: str) -> T:
    """Return an instance of the dataclass `kind` made from a mapping; `where` names the data in errors.

    A UserError is raised if `schema_version` differs from the field's default (checked first), a key is unknown or
    missing, a value has the wrong type, or `kind` itself refuses it.
    """
    version = next((field.default for field in fields(kind) if field.name == "schema_version"), None)  # type: ignore[arg-type]
    if version is not None and isinstance(data, Mapping) and (stated := data.get("schema_version")) != version:
        raise UserError(
            f"{where}: `schema_version` must be {version}, but got {stated!r}; it was written by another version of "
            "this package: use that one, or make it anew."
        )
    try:
        # via JSON, the only input whose lists become tuples; dates of YAML become texts
        decoded: T = _adapter(kind)(json.dumps([data], default=str))[0]  # type: ignore[arg-type]
    except ValidationError as refused:
        errors: Any = refused.errors(include_url=False)
        error = min(
            errors, key=lambda each: each["type"] != "unexpected_keyword_argument"
        )  # a misspelt key causes two errors
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, Exception) and not isinstance(cause, UserError):
            raise cause from None  # a bug in `kind`
        raise UserError(_line(kind, data, error, where)) from None
    return decoded


@cache
def _adapter(kind: Any) -> Callable[[str], Any]:
    return TypeAdapter(tuple[kind], config=ConfigDict(strict=True, extra="forbid")).validate_json


def _line(kind: type, data: object, error: Any, where: str) -> str:
    """Format an error of pydantic as one line: the place, from the value outwards, the rule, value and remedy."""
    steps: list[Any] = []
    value: Any = [data]
    for step in error["loc"]:  # also names options of unions, which are not in the data
        with suppress(LookupError, TypeError):
            value = value[step]
            steps.append(step)
    rule, last = error["type"], error["loc"][-1:]
    if rule == "unexpected_keyword_argument":
        names = _names(tuple[kind], steps[:-1])  # type: ignore[valid-type]
        complaint = f" has the unknown key {steps.pop()!r}; known keys are {', '.join(names)}."
    elif rule == "missing" and isinstance(last[0], str):
        complaint = f" lacks the key {last[0]!r}."
    elif rule in _RULES:
        expected = _RULES[rule].format(**error.get("ctx", {})).replace("'", "").replace(" or ", ", ")
        complaint = f" {expected}, but got {value!r:.80}"
        with suppress(ValueError):  # a text such as 1e9, which YAML reads as a number only with a point
            complaint += f"; write {float(value)!r}" if rule == "float_type" and isinstance(value, str) else ""
        complaint += "."
    else:
        complaint = f": {error['msg'].removeprefix('Value error, ')}"
    place = "".join(f"item {step} of " if isinstance(step, int) else f"`{step}` of " for step in reversed(steps[1:]))
    return f"{place}{where}{complaint}"


def _names(hint: Any, steps: Sequence[Any]) -> list[str]:
    if is_dataclass(hint):
        return _names(get_type_hints(hint)[steps[0]], steps[1:]) if steps else [field.name for field in fields(hint)]
    inside = steps[1:] if get_origin(hint) in (tuple, dict) else steps
    return next((names for option in get_args(hint) if (names := _names(option, inside))), [])
