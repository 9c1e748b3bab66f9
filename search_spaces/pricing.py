"""The cost of one architecture for a workload, folded or unfolded."""

from functools import partial
from typing import NamedTuple

from costmodel.cost import Price, shared_price, total_price
from costmodel.estimate import Pricer
from costmodel.report.savings import Saving, savings
from search_spaces.architecture import Architecture
from search_spaces.budget.priced_space import CostForm
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.workload import Workload


class PricedArchitecture(NamedTuple):
    """The cost per new token, and the least and greatest latency that the cost model's data allow, or None."""

    price: Price
    latency_s_range: tuple[float, float] | None


def price_architecture(
    architecture: Architecture, pricer: Pricer, workload: Workload, cost_of: CostForm
) -> PricedArchitecture:
    """Price every op graph of the workload; an architecture that is already folded is priced as it is.

    A UserError is raised for a workload that the architecture does not support, or an op without formula.
    """
    graphs = workload.graphs(deployed(architecture) if cost_of == "folded" else architecture)
    whole = total_price(price for graph in graphs for price in pricer.prices(graph.nodes))
    shares, bounds = workload.new_tokens, pricer.latency_s_range([node for graph in graphs for node in graph])
    return PricedArchitecture(shared_price(whole, shares), bounds and (bounds[0] / shares, bounds[1] / shares))


def cheaper(architecture: Architecture, pricer: Pricer, workload: Workload, cost_of: CostForm) -> tuple[Saving, ...]:
    """Return flags of `costmodel estimate` by which an architecture is run for less, its function unchanged."""
    return savings(
        partial(lower, deployed(architecture) if cost_of == "folded" else architecture),
        pricer,
        workload.deployment,
        prompt_len=workload.prompt_len,
        new_tokens=workload.new_tokens,
        context=architecture.context,
    )
