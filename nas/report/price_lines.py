"""What the prices of a front rest on: whom they trust, and what of its members lies outside the data."""

import math
from collections.abc import Iterable, Sequence

from costmodel.data_range import describe
from costmodel.estimate import Pricer
from costmodel.ops import OpGraph
from costmodel.protocols import TRUST, published
from costmodel.trust import caption
from nas.results.ledger import deployed_of
from nas.results.members import TrainedMember
from search_spaces.architecture import Architecture
from search_spaces.workload import Workload


def price_line(found: Sequence[TrainedMember], base: Architecture, protocol: str, workload: Workload) -> str:
    """One line; members are judged as they are deployed. The data of `published` alone have a range."""
    words = ""
    if protocol == "published":
        graphs = [graph for member in found for graph in workload.graphs(deployed_of(member.most_expensive, base))]
        words = outside(published.load(), graphs)
    return f"prices: protocol {protocol} ({caption(TRUST[protocol])}){words and f'; {words}'}"


def outside(pricer: Pricer, graphs: Iterable[OpGraph]) -> str:
    """What of some models lies outside the data of their prices, each dimension once; empty if nothing does.

    `num_layers 6 (data: 12 to 18)` and `num_layers 10 (data: 12 to 18)` are `num_layers 6, 10 (data: 12 to 18)`; of
    how many times an op does more than any that was measured, the most.
    """
    values: dict[tuple[str, str], dict[str, None]] = {}
    for text in dict.fromkeys(text for graph in graphs for text in pricer.extrapolated(graph)):
        name, _, rest = text.partition(" ")
        value, _, known = rest.partition(" (")
        values.setdefault((name, known), {})[value] = None
    return describe(f"{name} {_joined(those)}{known and f' ({known}'}" for (name, known), those in values.items())


def _joined(values: Iterable[str]) -> str:
    """Numbers in order, words as they came; only the largest of factors."""
    known = list(values)
    if all(value.endswith("x") for value in known):
        return max(known, key=lambda value: float(value.removesuffix("x")))
    return ", ".join(sorted(known, key=lambda value: float(value) if value.isdigit() else math.inf))
