"""Former names of settings and fields, so that old flags, configuration files and stored runs can still be read."""

from collections.abc import Mapping
from typing import Any

REMOVED = {  # a removed flag, by the name of its setting, and its replacement
    "knowledge": "a search learns from its own trainings alone",
    "warm_start": "continue a run by --resume RUN, with another --budget-latency or a larger --num-trials",
}

RENAMED = {  # former name -> present name; a name within another is written with points
    "accounting": "cost_of",
    "also_validate": "second_eval_data",
    "is_look": "is_proxy",
    "num_looks": "num_proxy_evals",
    "recipe.route": "recipe.distillation",
    "recipe.route.distillation": "recipe.distillation.prediction_weight",
    "recipe.route.most_likely": "recipe.distillation.teacher_top_k",
    "recipe.route.spread": "recipe.distillation.spread_over_depth",
    "recipe.route.streams": "recipe.distillation.hidden_state_weight",
}

_VALUES = {"cost_of": {"deployed": "folded", "written": "unfolded"}}


def present_name(name: str) -> str:
    """Return the present name of a setting, with points between its parts."""
    if name in RENAMED:
        return RENAMED[name]
    outer, point, last = name.rpartition(".")
    return f"{present_name(outer)}{point}{last}" if outer else name


def present_value(name: str, value: Any) -> Any:
    """Return the present form of a value, given the present name of its setting."""
    return _VALUES[name].get(value, value) if name in _VALUES and isinstance(value, str) else value


def with_present_names(data: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return plain data under present names. `within` are the former names around it, each followed by a point."""
    present: dict[str, Any] = {}
    for key, value in data.items():
        name = present_name(f"{within}{key}")
        if isinstance(value, Mapping):
            value = with_present_names(value, f"{within}{key}.")
        present[name.rpartition(".")[2]] = present_value(name, value)
    return present


def with_former_names(data: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    """Return plain data under former names, for identifiers. `within` are present names, each followed by a point."""
    former = {present: name for name, present in RENAMED.items()}
    return {
        former.get(f"{within}{key}", key).rpartition(".")[2]: (
            with_former_names(value, f"{within}{key}.") if isinstance(value, Mapping) else value
        )
        for key, value in data.items()
    }
