"""Removes choices that a protocol cannot price from a space, and says why."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from costmodel.errors import UnpricedOpError, UserError
from costmodel.estimate import Pricer
from search_spaces.architecture import Layer
from search_spaces.budget.priced_space import EMPTY_LAYER, CostForm, LayerPrices
from search_spaces.definition import Choices
from search_spaces.deployed import Region, deployed_layer
from search_spaces.space import SearchSpace, build_space
from search_spaces.workload import Workload


def priceable(
    space: SearchSpace, pricer: Pricer, workload: Workload, cost_of: CostForm = "folded"
) -> tuple[SearchSpace, dict[str, str]]:
    """Return the space without choices that have no formula, and the reasons by choice, such as `ffn square`.

    A space that lists its members does not change. A UserError is raised if no choice of some kind can be priced.
    """
    choices = space.definition.choices
    if choices is None:
        return space, {}
    prices, left_out = LayerPrices(space.base, pricer, workload, cost_of), dict[str, str]()
    kept: dict[str, Any] = {}
    for kind in (field.name for field in fields(Choices)):
        named = {f"{kind} {choice}": choice for choice in getattr(choices, kind)}
        usual = {
            "attention": next((form for form in kept.get("attention", ()) if form != "none"), "none"),
            "inner1": choices.inner1[-1],
            "inner2": choices.inner2[-1],
        }
        reasons = {name: _reason(prices, kind, choice, usual, cost_of) for name, choice in named.items()}
        left_out |= {name: reason for name, reason in reasons.items() if reason}
        kept[kind] = tuple(choice for name, choice in named.items() if not reasons[name])
        if not kept[kind]:
            raise UserError(
                f"space {space.name!r} must have a choice of {kind} that has a price, but got "
                f"{', '.join(map(str, named.values()))}: {next(iter(reasons.values()))}"
            )
    if not left_out:
        return space, {}
    return build_space(replace(space.definition, choices=Choices(**kept)), space.base), left_out


def _reason(prices: LayerPrices, kind: str, choice: str, usual: Mapping[str, str], cost_of: CostForm) -> str | None:
    """Return why a choice has no price, or None. usual: choices that have one, for the rest of the layer."""
    # a layer whose other parts always have a cost; a norm is the same op before either sub-layer
    place = "norm2" if kind == "norm1" else kind
    bare: dict[str, Any] = {
        "attention": usual["attention"] if place == "inner1" else "none",
        "ffn": "identity" if place in ("norm2", "stabiliser", "inner2") else "none",
    }
    if bare["attention"] == "none" and place == "inner1":
        return None  # no attention is left to have it
    bare |= {place: choice}
    for part, inner in (("attention", "inner1"), ("ffn", "inner2")):
        bare.setdefault(inner, usual[inner] if bare[part] != "none" else "own")
    layer = Layer(**bare)
    if cost_of == "folded":  # not ahead of all norms, so that a linear FFN stays
        layer = deployed_layer(prices.base, layer, Region(ahead=False, behind=False))
    if layer == EMPTY_LAYER:
        return None
    try:
        prices.of_layer(layer, 0)
    except UnpricedOpError as error:
        return str(error)
    return None
