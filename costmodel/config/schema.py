"""Plain data (as read from YAML or JSON) to frozen dataclasses: every key known, present and of its type."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from costmodel.config.quick_schema import MismatchError, converter
from costmodel.config.text import is_text
from costmodel.errors import UserError

T = TypeVar("T")


def decode(kind: type[T], data: object, where: str) -> T:
    """An instance of the dataclass `kind` from a mapping; `where` names the data in errors.

    Raises UserError for another `schema_version` than the field's default (before any other complaint), an unknown or
    missing key, a value of the wrong type, or what `kind` itself refuses.
    """
    try:
        found: T = converter(kind)(data)  # type: ignore[arg-type]
        return found
    except (MismatchError, UserError):
        return _decoded(kind, data, where)  # which says what is wrong, and where


def _decoded(kind: type[T], data: object, where: str) -> T:
    if not isinstance(data, Mapping):
        raise UserError(f"{where} must be a mapping of keys to values, but got {data!r:.80}.")
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if version := known.get("schema_version"):
        _check_version(version.default, data, where)
    if unknown := [str(key) for key in data if key not in known]:
        raise UserError(f"{where} has the unknown key {unknown[0]!r}; known keys are {', '.join(known)}.")
    for name, field in known.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise UserError(f"{where} lacks the key {name!r}.")
    values = {name: _value(hints[name], value, f"`{name}` of {where}") for name, value in data.items()}
    try:
        return kind(**values)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _check_version(supported: object, data: Mapping[Any, Any], where: str) -> None:
    """A field without a default has no supported version to compare with."""
    found = data.get("schema_version", supported)
    if supported is not MISSING and found != supported:
        raise UserError(
            f"{where}: `schema_version` must be {supported}, but got {found!r:.80}; "
            f"it was written by another version of this package."
        )


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return _decoded(hint, value, where)
    if origin is Literal:
        if not isinstance(value, str | int) or value not in get_args(hint):
            raise UserError(f"{where} must be one of {', '.join(map(str, get_args(hint)))}, but got {value!r:.80}.")
        return value
    if origin in (Union, UnionType):
        return _union(get_args(hint), value, where)
    if origin is tuple:
        return _tuple(get_args(hint), value, where)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{where} must be a mapping, but got {value!r:.80}.")
        return {key: _value(get_args(hint)[1], item, f"{key!r} in {where}") for key, item in value.items()}
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise UserError(f"{where} must be of type float, but is beyond its range.") from None
    if type(value) is not hint:
        remedy = _with_point(value) if hint is float else ""
        raise UserError(f"{where} must be of type {hint.__name__}, but got {value!r:.80}{remedy}.")
    if isinstance(value, str) and not is_text(value):
        raise UserError(f"{where} must hold neither a null character nor half a surrogate pair, but got {value!r:.80}.")
    return value


def _with_point(value: Any) -> str:
    """What to write for a text such as 1e9, which in YAML is no number without a point."""
    try:
        return f"; write {float(value)!r}" if isinstance(value, str) else ""
    except ValueError:
        return ""


def _union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and NoneType in options:
        return None
    errors = []
    for option in options:
        if option is not NoneType:
            try:
                return _value(option, value, where)
            except UserError as error:
                errors.append(error)
    raise errors[0]


def _tuple(items: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise UserError(f"{where} must be a list, but got {value!r:.80}.")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(_value(items[0], item, f"item {index} of {where}") for index, item in enumerate(value))
    if len(items) != len(value):
        raise UserError(f"{where} must have {len(items)} items, but got {len(value)}.")
    return tuple(_value(hint, item, where) for hint, item in zip(items, value, strict=True))
