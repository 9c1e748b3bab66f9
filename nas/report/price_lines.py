"""What the prices of a front rest on: whom they trust, and what of its members lies outside the data."""

from collections.abc import Sequence

from costmodel.protocols import published
from costmodel.trust.adversary import TRUST, caption
from costmodel.trust.data_range import said
from nas.results.ledger import deployed_of
from nas.results.members import TrainedMember
from search_spaces.architecture import Architecture
from search_spaces.workload import Workload


def price_line(found: Sequence[TrainedMember], base: Architecture, protocol: str, workload: Workload) -> str:
    """One line; members are judged as they are deployed. The data of `published` alone have a range."""
    outside: dict[str, None] = {}
    if protocol == "published":
        pricer = published.load()
        graphs = [graph for member in found for graph in workload.graphs(deployed_of(member.first, base))]
        outside = dict.fromkeys(text for graph in graphs for text in pricer.extrapolated(graph))
    words = said(outside)
    return f"prices: protocol {protocol} ({caption(TRUST[protocol])}){words and f'; {words}'}"
