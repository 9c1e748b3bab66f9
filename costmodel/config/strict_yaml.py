"""Reads and writes strict YAML: keys are strings, and none appears twice."""

from pathlib import Path
from typing import Any

import yaml

from costmodel.errors import UserError


class _StrictLoader(yaml.CSafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in keys:
                problem = f"key {key!r} {'appears twice' if isinstance(key, str) else 'is not a string'}"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            keys.add(key)
        return super().construct_mapping(node, deep)


def load_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping at the top of a YAML file.

    A UserError that names the file and the place is raised if it cannot be read or is not a plain mapping.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} must be YAML text in UTF-8, but holds binary data.") from None
    except yaml.MarkedYAMLError as error:
        place = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path} is not valid YAML: {error.problem}{place}.") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:  # such as 2020-99-99
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split()):.120}.") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold a mapping of keys to values, but holds {type(data).__name__}.")
    return data


def dump(data: dict[str, Any]) -> str:
    """Return plain data as YAML text, with keys in their given order."""
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
