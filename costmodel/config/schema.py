"""Plain data (as read from YAML or JSON) to frozen dataclasses: every key known, present and of its type.

A type is compiled once into a function of data, so that a ledger of 100,000 lines is read in seconds. Where data do
not fit, each container on the way out adds its name for the place.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from costmodel.errors import UserError

T = TypeVar("T")
Converter: TypeAlias = Callable[[Any], Any]


class _MismatchError(Exception):
    """place: from the value outwards, such as "`kind` of item 0 of ". got: the value, where the rule is told of one.

    The text is put together only where somebody reads it: the first options of a union often do not fit.
    """

    def __init__(self, rule: str, got: Any = MISSING, remedy: str = "") -> None:
        self.place, self.rule, self.got, self.remedy = "", rule, got, remedy

    def within(self, name: str) -> "_MismatchError":
        self.place += f"{name} "
        return self

    def text(self, where: str) -> str:
        got = "" if self.got is MISSING else f", but got {self.got!r:.80}{self.remedy}."
        return f"{self.place}{where}{self.rule}{got}"


def is_text(value: str) -> bool:
    """Whether a text holds neither null characters nor halves of surrogate pairs, which UTF-8 has no place for.

    The system hands over bytes that are no UTF-8, say in a path, as such halves; JSON and YAML may escape them.
    """
    return "\0" not in value and (value.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in value))


def decode(kind: type[T], data: object, where: str) -> T:
    """An instance of the dataclass `kind` from a mapping; `where` names the data in errors.

    Raises UserError for another `schema_version` than the field's default (before any other complaint), an unknown or
    missing key, a value of the wrong type, or what `kind` itself refuses.
    """
    try:
        decoded: T = _converter(kind)(data)  # type: ignore[arg-type]
    except _MismatchError as error:
        raise UserError(error.text(where)) from None
    return decoded


@cache
def _converter(hint: Any) -> Converter:
    """What makes a value of a type out of plain data, or raises _MismatchError."""
    origin = get_origin(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint)
    if origin is Literal:
        return _literal(get_args(hint))
    if origin in (Union, UnionType):
        return _union(get_args(hint))
    if origin is tuple:
        return _tuple(get_args(hint))
    if origin is dict:
        return _dict(_converter(get_args(hint)[1]))
    return {float: _float, str: _text}.get(hint) or _exactly(hint)


def _dataclass(kind: type) -> Converter:
    hints, known = get_type_hints(kind), {field.name: field for field in fields(kind)}
    needed = {name for name, field in known.items() if field.default is field.default_factory is MISSING}
    converters = {name: _converter(hints[name]) for name in known}
    version = known["schema_version"].default if "schema_version" in known else MISSING

    def convert(data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise _MismatchError(" must be a mapping of keys to values", data)
        if version is not MISSING and (stated := data.get("schema_version")) != version:
            remedy = "; it was written by another version of this package: use that one, or make it anew"
            raise _MismatchError(f": `schema_version` must be {version}", stated, remedy)
        if not (data.keys() <= converters.keys() and needed <= data.keys()):
            raise _MismatchError(_wrong_keys(data, known, needed))
        values = {}
        name = ""
        try:
            for name, value in data.items():
                values[name] = converters[name](value)
        except _MismatchError as error:
            raise error.within(f"`{name}` of") from None
        try:
            return kind(**values)
        except UserError as error:
            raise _MismatchError(f": {error}") from None

    return convert


def _wrong_keys(data: Mapping[Any, Any], known: Iterable[str], needed: Container[str]) -> str:
    if unknown := [str(key) for key in data if key not in known]:
        return f" has the unknown key {unknown[0]!r}; known keys are {', '.join(known)}."
    return f" lacks the key {next(name for name in known if name in needed and name not in data)!r}."


def _literal(options: tuple[Any, ...]) -> Converter:
    allowed = frozenset(options)

    def convert(value: Any) -> Any:
        if not isinstance(value, str | int) or value not in allowed:
            raise _MismatchError(f" must be one of {', '.join(map(str, options))}", value)
        return value

    return convert


def _union(options: tuple[Any, ...]) -> Converter:
    """Converts by the first option that fits; where none does, raises the first one's complaint."""
    may_be_none = NoneType in options
    first, *others = [_converter(option) for option in options if option is not NoneType]

    def convert(value: Any) -> Any:
        if value is None and may_be_none:
            return None
        try:
            return first(value)
        except _MismatchError as error:
            for other in others:
                with suppress(_MismatchError):
                    return other(value)
            raise error from None

    return convert


def _tuple(items: tuple[Any, ...]) -> Converter:
    is_open = len(items) == 2 and items[1] is Ellipsis
    converters = [_converter(item) for item in items if item is not Ellipsis]

    def convert(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise _MismatchError(" must be a list", value)
        if not is_open:
            if len(value) != len(converters):
                raise _MismatchError(f" must have {len(converters)} items", len(value))
            return tuple(converter(item) for converter, item in zip(converters, value, strict=True))
        if converters[0] is _float and set(map(type, value)) == {float}:
            return tuple(value)
        made: list[Any] = []
        try:
            made.extend(map(converters[0], value))  # keeps what came before an error
        except _MismatchError as error:
            raise error.within(f"item {len(made)} of") from None
        return tuple(made)

    return convert


def _dict(of_values: Converter) -> Converter:
    def convert(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _MismatchError(" must be a mapping", value)
        made = {}
        for key, item in value.items():
            try:
                made[key] = of_values(item)
            except _MismatchError as error:
                raise error.within(f"{key!r} in") from None
        return made

    return convert


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is not int:
        raise _MismatchError(" must be of type float", value, _with_point(value))
    try:
        return float(value)
    except OverflowError:
        raise _MismatchError(" must be of type float, but is beyond its range.") from None


def _with_point(value: Any) -> str:
    """What to write for a text such as 1e9, which in YAML is no number without a point."""
    try:
        return f"; write {float(value)!r}" if isinstance(value, str) else ""
    except ValueError:
        return ""


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _MismatchError(" must be of type str", value)
    if not is_text(value):
        raise _MismatchError(" must hold neither a null character nor half a surrogate pair", value)
    return value


def _exactly(hint: Any) -> Converter:
    def convert(value: Any) -> Any:
        if type(value) is not hint:
            raise _MismatchError(f" must be of type {hint.__name__}", value)
        return value

    return convert
