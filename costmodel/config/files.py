"""Reads the files that users name, as strict YAML or JSON, and decodes their plain data to dataclasses.

A file must be regular, of bounded size, and nest lists and mappings at most MOST_LEVELS deep. YAML must have string
keys, none twice, and no anchors, aliases or merge keys.
"""

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from costmodel.errors import UserError

# limits of files, in bytes but for MOST_LEVELS
MOST_YAML = 1_000_000  # takes seconds to read; the largest committed file has 13 kB
MOST_JSON = 256_000_000  # the tokenizer of a vocabulary of 256,000 tokens has 33 MB
MOST_TEXT = 16_000_000_000  # text that is read at once
MOST_ROWS = 100_000_000_000  # files that are read row by row
MOST_WEIGHTS = 100_000_000_000  # files of weights
MOST_LINE = 1_000_000_000  # one row
MOST_LEVELS = 64  # nested lists and mappings; the committed files have 8
_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
_UNSIZED = 1 << 16  # bytes that are read of a file whose size the system does not tell, as under /proc


def open_file(path: Path, most: int) -> BufferedReader:
    """Open a regular file to read its bytes.

    A UserError is raised if the file cannot be opened, is not regular, or has more than `most` bytes.
    """
    try:
        # a pipe that nobody writes to must not block
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size <= most:
        return file
    file.close()
    if stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} must have at most {most:,} bytes, but has {status.st_size:,}; give a smaller file.")
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "special file")
    raise UserError(f"{path} must be a regular file, but is a {kind}; give a file.")


def read_bytes(path: Path, most: int) -> bytes:
    """Return the content of a regular file, or its first 64 KiB if the system states no size, as under /proc.

    A UserError is raised if it cannot be read or exceeds `most` bytes.
    """
    try:
        with open_file(path, most) as file:
            return file.read(-1 if os.fstat(file.fileno()).st_size else _UNSIZED)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def read_text(path: Path, most: int) -> str:
    """Return the text of a file. A UserError is raised if it cannot be read, exceeds `most` bytes or is not UTF-8."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} must be text in UTF-8, but holds binary data.") from None


def read_json(path: Path, rule: str = "must be JSON") -> Any:
    """Return the plain data of a JSON file; a UserError that names the path is raised if that fails.

    rule: what the error says of the file if its text is not JSON or is nested too deep.
    """
    return plain_json(read_text(path, MOST_JSON), f"{path} {rule}")


def plain_json(text: str | bytes, rule: str) -> Any:
    """Return JSON text as plain data; raise a UserError that begins with `rule` for other text or too deep nesting."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{rule}, but cannot be parsed: {getattr(error, 'msg', error)!s:.200}.") from None
    level = [data]
    for _ in range(MOST_LEVELS):
        if not (level := [part for whole in level if isinstance(whole, dict | list) for part in _parts(whole)]):
            return data
    raise UserError(f"{rule}, but nests lists and mappings more than {MOST_LEVELS} deep.")


def _parts(whole: Any) -> Iterable[Any]:
    return whole.values() if isinstance(whole, dict) else whole


T = TypeVar("T")

_RULES = {  # pydantic's name of an error -> our text
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

    A UserError is raised if a key is unknown or missing, a value has the wrong type, or `kind` itself refuses it. If
    `kind` has a field `schema_version`, its default is checked first, and is the only value that is allowed.
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
        # a misspelt key causes two errors
        error = min(errors, key=lambda each: each["type"] != "unexpected_keyword_argument")
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, Exception) and not isinstance(cause, UserError):
            raise cause from None  # a bug in `kind`
        raise UserError(_line(kind, data, error, where)) from None
    return decoded


def load_file(kind: type[T], path: Path) -> T:
    """Return an instance of the dataclass `kind` from a YAML file; errors are those of `load_mapping` and `decode`."""
    return decode(kind, load_mapping(path), str(path))


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


MOST_BITS = 8192  # of an integer in YAML, below the 4,300 digits that Python can write


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write equal values out, since `load_mapping` refuses anchors."""
        return True


class _StrictLoader(yaml.CSafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in keys:
                problem = f"key {key!r:.80} {'appears twice' if isinstance(key, str) else 'is not a string'}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = int(super().construct_yaml_int(node))
        if value.bit_length() > MOST_BITS:
            raise yaml.MarkedYAMLError(problem="a number has too many digits", problem_mark=node.start_mark)
        return value


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)


def load_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping at the top of a YAML file, which must have no anchors, aliases or merge keys.

    A UserError that names the file is raised if it cannot be read or does not hold such a mapping.
    """
    text = read_text(path, MOST_YAML)
    try:
        _check_events(text)
        data = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        place = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path} is not valid YAML: {error.problem}{place}.") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:  # such as 2020-99-99
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split()):.120}.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold a mapping of keys to values, but holds {type(data).__name__}.")
    return data


def _check_events(text: str) -> None:
    """Raise a MarkedYAMLError for anchors, merge keys, null characters or deep nesting, before data are made."""
    level, events = 0, cast(Iterator[Any], yaml.parse(text, Loader=yaml.CSafeLoader))
    for event in events:
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        problem = f"lists and mappings are nested more than {MOST_LEVELS} deep" if level > MOST_LEVELS else ""
        if getattr(event, "anchor", None) is not None:
            problem = f"the anchor or alias {event.anchor!r:.80} is not allowed; write the value out"
        if isinstance(event, yaml.ScalarEvent):
            if event.value == "<<" and event.implicit[0]:
                problem = "the merge key << is not allowed; write the keys out"
            elif "\0" in event.value:
                problem = "a text must have no null characters"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def dump(data: dict[str, Any]) -> str:
    """Return plain data as YAML text, with keys in their given order."""
    layout: dict[str, Any] = {"sort_keys": False, "default_flow_style": None, "width": 120, "allow_unicode": True}
    return str(yaml.dump(data, Dumper=_PlainDumper, **layout))
