"""The prices of a candidate under every protocol of a search, and the fields of a ledger's record that they are."""

from dataclasses import asdict
from typing import Any, NamedTuple

from costmodel.cost import Costs, Price
from nas.run.ledger import price_columns
from search_spaces.architecture import Architecture
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.pricing import price_architecture


class CandidatePrices(NamedTuple):
    """Under the protocol that orders the front, with its range; also: under the others, by name."""

    price: Price
    latency_s_range: tuple[float, float] | None
    also: dict[str, Costs]


def prices_of(architecture: Architecture, feasible: FeasibleSpace) -> CandidatePrices:
    """Raises UserError for an op without formula."""
    first, *others = (
        price_architecture(
            architecture, constraint.priced.pricer, constraint.priced.workload, constraint.priced.accounting
        )
        for constraint in feasible.every
    )
    names = (constraint.priced.pricer.protocol for constraint in feasible.also)
    return CandidatePrices(*first, {name: Costs.of(other.price) for name, other in zip(names, others, strict=True)})


def price_fields(prices: CandidatePrices, predicted: CandidatePrices | None, feasible: FeasibleSpace) -> dict[str, Any]:
    """predicted: by rule; None where a candidate is priced as written."""
    by_rule = {}
    if predicted is not None:
        costs = asdict(Costs.of(predicted.price)) | {"also": predicted.also}
        by_rule = {f"predicted_{name}": cost for name, cost in costs.items()}
    columns = price_columns(feasible.priced.pricer, prices.price)
    return {**columns, "latency_s_range": prices.latency_s_range, "also": prices.also, **by_rule}
