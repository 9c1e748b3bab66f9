"""`estimate`: an op graph priced op by op under a protocol and its testbed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from costmodel.cost import Price, total_price
from costmodel.errors import UserError
from costmodel.ops import LayerId, Node, Op, OpGraph
from costmodel.trust.adversary import Trust


class Pricer(ABC):
    """A protocol on a testbed: prices ops from their shapes alone.

    protocol, network: the names the command line knows; network is None where it is fitted in.
    cost_model_id: equal for equal prices of every op; see `protocols.identity`.
    range_over: what the latency range is a range over, in words.
    """

    protocol: str
    network: str | None
    cost_model_id: str
    range_over: str

    @property
    @abstractmethod
    def trust(self) -> Trust:
        """Whom the protocol trusts."""

    @abstractmethod
    def price(self, op: Op) -> Price:
        """The cost of one op. Raises UserError for an op the protocol has no formula for."""

    @abstractmethod
    def latency_s_range(self, graph: OpGraph) -> tuple[float, float] | None:
        """Least and greatest latency over all coefficients consistent with the data, or None if exact."""

    def extrapolated(self, graph: OpGraph) -> tuple[str, ...]:
        """What of a graph lies outside the data that the prices were fitted on, in words; nothing unless overridden."""
        return ()

    @abstractmethod
    def prior_share(self, graph: OpGraph) -> float | None:
        """Share of the latency that rests on priors and not on data, 0 to 1, or None if there are no priors."""

    def extrapolation(self, op: Op) -> float | None:
        """How many times more an op does than any that seconds were fitted on, at least 1, or None."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """An op graph with its prices; `by_op` and `by_layer` sum to `total`.

    extrapolations: of every op of `by_op`, as `Pricer.extrapolation` says.
    """

    protocol: str
    network: str | None
    trust: Trust
    total: Price
    by_layer: tuple[tuple[LayerId, Price], ...]
    by_op: tuple[tuple[Node, Price], ...]
    extrapolations: tuple[float | None, ...]
    latency_s_range: tuple[float, float] | None
    range_over: str
    prior_share: float | None
    extrapolated: tuple[str, ...] = ()


def estimate(graph: OpGraph, pricer: Pricer) -> Estimate:
    """Prices every node of the graph. Raises UserError, naming the node, for an op the protocol has no formula for."""
    prices: dict[Op, Price] = {}
    for node in graph:
        if node.op not in prices:  # layers repeat their ops
            prices[node.op] = _price(node, pricer)
    extrapolations = {op: pricer.extrapolation(op) for op in prices}
    by_op = tuple((node, prices[node.op]) for node in graph)
    layers: dict[LayerId, list[Price]] = {}
    for node, price in by_op:
        layers.setdefault(node.layer, []).append(price)
    by_layer = tuple((layer, total_price(prices)) for layer, prices in layers.items())
    return Estimate(
        protocol=pricer.protocol,
        network=pricer.network,
        trust=pricer.trust,
        total=total_price(price for _, price in by_layer),
        by_layer=by_layer,
        by_op=by_op,
        extrapolations=tuple(extrapolations[node.op] for node in graph),
        latency_s_range=pricer.latency_s_range(graph),
        range_over=pricer.range_over,
        prior_share=pricer.prior_share(graph),
        extrapolated=pricer.extrapolated(graph),
    )


def _price(node: Node, pricer: Pricer) -> Price:
    try:
        return pricer.price(node.op)
    except UserError as error:
        raise type(error)(f"op {node.name!r} must have a price: {error}") from None
