"""Reads and writes strict YAML: keys are strings, none appears twice, and there are no anchors and aliases."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import yaml

from costmodel.config.user_files import MOST_LEVELS, MOST_YAML, read_text
from costmodel.errors import UserError

MOST_BITS = 8192  # of a number: Python writes at most 4,300 digits


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
    """Return the mapping at the top of a YAML file, which has no anchors, aliases and merge keys.

    A UserError that names the file and the place is raised if it cannot be read or is not a plain mapping.
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
    """Refuse what makes a short text large (anchors) or deep, before anything is made of it."""
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
