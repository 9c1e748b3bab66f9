"""What `costmodel.config.schema` accepts, converted without a word on what is wrong: for ledgers of 100,000 lines.

A type is compiled once into a function of plain data that returns the value or raises MismatchError.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from costmodel.config.text import is_text

Converter: TypeAlias = Callable[[Any], Any]


class MismatchError(Exception):
    """The data are not of the type; `costmodel.config.schema` says why."""


@cache
def converter(hint: Any) -> Converter:
    """What makes a value of a type of plain data."""
    origin = get_origin(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint)
    if origin is Literal:
        return _literal(frozenset(get_args(hint)))
    if origin in (Union, UnionType):
        return _union(get_args(hint))
    if origin is tuple:
        return _tuple(get_args(hint))
    if origin is dict:
        return _dict(converter(get_args(hint)[1]))
    return {float: _float, str: _text}.get(hint) or _exactly(hint)


def _dataclass(kind: type) -> Converter:
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}
    needed = frozenset(name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING)
    made = {name: converter(hints[name]) for name in known}
    version = known["schema_version"].default if "schema_version" in known else MISSING

    def convert(data: Any) -> Any:
        if not isinstance(data, Mapping) or not (data.keys() <= made.keys() and needed <= data.keys()):
            raise MismatchError
        if version is not MISSING and data.get("schema_version", version) != version:
            raise MismatchError
        return kind(**{name: made[name](value) for name, value in data.items()})

    return convert


def _literal(options: frozenset[Any]) -> Converter:
    def convert(value: Any) -> Any:
        if not isinstance(value, str | int) or value not in options:
            raise MismatchError
        return value

    return convert


def _union(options: tuple[Any, ...]) -> Converter:
    may_be_none = NoneType in options
    others = [converter(option) for option in options if option is not NoneType]

    def convert(value: Any) -> Any:
        if value is None and may_be_none:
            return None
        for other in others[:-1]:
            try:
                return other(value)
            except MismatchError:
                pass
        return others[-1](value)

    return convert


def _tuple(items: tuple[Any, ...]) -> Converter:
    made = [converter(item) for item in items if item is not Ellipsis]
    is_open = len(items) == 2 and items[1] is Ellipsis

    def convert(value: Any) -> Any:
        if not isinstance(value, list | tuple) or (not is_open and len(value) != len(made)):
            raise MismatchError
        if is_open and made[0] is _float and set(map(type, value)) == {float}:
            return tuple(value)
        return (
            tuple(map(made[0], value)) if is_open else tuple(one(item) for one, item in zip(made, value, strict=True))
        )

    return convert


def _dict(of_values: Converter) -> Converter:
    def convert(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise MismatchError
        return {key: of_values(item) for key, item in value.items()}

    return convert


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise MismatchError
    try:
        return float(value)
    except OverflowError:
        raise MismatchError from None


def _text(value: Any) -> str:
    if type(value) is not str or not is_text(value):
        raise MismatchError
    return value


def _exactly(hint: Any) -> Converter:
    def convert(value: Any) -> Any:
        if type(value) is not hint:
            raise MismatchError
        return value

    return convert
