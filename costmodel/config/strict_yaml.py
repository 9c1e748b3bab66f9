"""Strict YAML in and out: no duplicate keys, no aliases (YAML bombs), no binary, no surprises."""

from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from costmodel.config.schema import is_text
from costmodel.errors import UserError

MAX_BYTES = 4_000_000  # far above any file of ours; a larger one is a mistake


class _StrictLoader(Composer, yaml.CSafeLoader):
    """A safe loader without aliases and with unique keys: libyaml reads the text, and Python composes what it reads."""

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        Composer.__init__(self)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event: Any = self.get_event()
            raise yaml.MarkedYAMLError(problem="aliases are not allowed", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and not is_text(value):
            problem = "a text must hold neither a null character nor half a surrogate pair"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is not a string", problem_mark=key_node.start_mark)
            if key in keys:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} appears twice", problem_mark=key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


def load_mapping(path: Path) -> dict[str, Any]:
    """The mapping at the top of a YAML file.

    Raises UserError, naming the file and the place, if it cannot be read or is not a plain mapping.
    """
    text = _text(path)
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}" if mark else ""
        raise UserError(f"{path} is not valid YAML: {error.problem}{place}.") from None
    except ValueError as error:  # a scalar that looks like a date or a number but is none
        raise UserError(f"{path} is not valid YAML: {error!s:.120}.") from None
    except (LookupError, AttributeError):  # a scalar with a tag, which the package takes at its word
        raise UserError(f"{path} is not valid YAML: a value is not of the type that its tag says.") from None
    except (yaml.YAMLError, RecursionError):
        raise UserError(f"{path} must be YAML text, but cannot be parsed.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold a mapping of keys to values, but holds {type(data).__name__}.")
    return data


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} must be at most {MAX_BYTES} bytes, but has {path.stat().st_size}.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} must be YAML text in UTF-8, but holds binary data.") from None


def dump(data: dict[str, Any]) -> str:
    """YAML text of plain data, keys in their given order."""
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
