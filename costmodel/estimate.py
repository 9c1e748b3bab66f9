"""`estimate`: an op graph priced op by op under a protocol and its testbed; `estimate_generation`: several in turn."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from costmodel.cost import Price, total_price
from costmodel.data_range import describe
from costmodel.errors import UserError
from costmodel.ops import LayerId, Node, Op, OpGraph
from costmodel.trust import Trust


class Pricer(ABC):
    """A protocol on a testbed: prices ops from their shapes alone.

    protocol, network: the names the command line knows; network is None where it is fitted in.
    cost_model_id: equal for equal prices of every op; see `protocols.identity`.
    range_over: what the latency range is a range over, in words.
    has_keys: whether a dealer sends each party keys ahead of a run, which prices have.
    setting: what of numbers and weights is priced; None where the protocol has it fitted in.
    """

    protocol: str
    network: str | None
    cost_model_id: str
    range_over: str
    has_keys: bool = False
    setting: Any = None

    @property
    @abstractmethod
    def trust(self) -> Trust:
        """Whom the protocol trusts."""

    @property
    def of_first_run(self) -> "Pricer":
        """Prices the first of several runs in turn, which makes what the others keep; itself if they keep nothing."""
        return self

    @abstractmethod
    def price(self, op: Op) -> Price:
        """The cost of one op. Raises UserError for an op the protocol has no formula for."""

    def latency_s_range(self, graph: Iterable[Node]) -> tuple[float, float] | None:
        """Least and greatest latency over all coefficients consistent with the data, or None if exact or unknown."""
        return None

    def extrapolated(self, graph: Iterable[Node]) -> tuple[str, ...]:
        """What of a graph lies outside the data that the prices were fitted on, in words.

        Unless overridden: kinds of op that do more than any that was measured, and how many times.
        """
        multiples: dict[str, float] = {}
        for op in dict.fromkeys(node.op for node in graph):
            name = type(op).__name__
            multiples[name] = max(multiples.get(name, 1.0), self.extrapolation(op) or 1.0)
        return tuple(f"{name} {times:.1f}x" for name, times in multiples.items() if times > 1)

    def prior_share(self, graph: Iterable[Node]) -> float | None:
        """Share of the latency that rests on priors and not on data, 0 to 1, or None if there are no priors."""
        return None

    def extrapolation(self, op: Op) -> float | None:
        """How many times more an op does than any that seconds were fitted on, at least 1, or None."""
        return None


def outside_data(pricer: Pricer, graphs: Iterable[OpGraph]) -> str:
    """Says what of several op graphs lies outside the data of their prices, as `describe` does."""
    return describe(text for graph in graphs for text in pricer.extrapolated(graph))


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """New tokens, one after the other, each by a run of its own.

    whole: all of them together. Its nodes are those of the prompt's run, then, their names with `@decode` behind, those
        of a run for one more token, of the shape that they have in the last run and with the price of them all.
    by_token: the price of the run that gives each.
    """

    whole: Estimate
    by_token: tuple[Price, ...]


def estimate(graph: OpGraph, pricer: Pricer) -> Estimate:
    """Prices every node of the graph. Raises UserError, naming the node, for an op the protocol has no formula for."""
    prices = _prices(graph, pricer)
    by_op = tuple((node, prices[node.op]) for node in graph)
    return _estimate(by_op, graph, graph, pricer, pricer.latency_s_range(graph))


def estimate_generation(runs: Sequence[OpGraph], pricer: Pricer) -> Generation:
    """Prices a run for each new token, the prompt's first, which also makes what the others keep.

    Each distinct op is priced once. Errors as of `estimate`.
    """
    prompt, *steps = runs
    later = [node for run in steps for node in run]
    first, prices = _prices(prompt, pricer.of_first_run), _prices(later, pricer)
    by_op = [(node, first[node.op]) for node in prompt]
    for nodes in zip(*steps, strict=True):
        last = replace(nodes[-1], name=f"{nodes[-1].name}@decode")
        by_op.append((last, total_price(prices[node.op] for node in nodes)))
    return Generation(
        whole=_estimate(
            tuple(by_op), [*prompt, *later], [node for node, _ in by_op], pricer, _range(prompt, later, pricer)
        ),
        by_token=(
            total_price(first[node.op] for node in prompt),
            *(total_price(prices[node.op] for node in run) for run in steps),
        ),
    )


def _range(prompt: OpGraph, later: Sequence[Node], pricer: Pricer) -> tuple[float, float] | None:
    """The range of a run and all later ones: together where they are priced alike, else apart."""
    if (first := pricer.of_first_run) == pricer:
        return pricer.latency_s_range([*prompt, *later])
    apart = first.latency_s_range(prompt), pricer.latency_s_range(later)
    if apart[0] is None or apart[1] is None:
        return None
    return apart[0][0] + apart[1][0], apart[0][1] + apart[1][1]


def _estimate(
    by_op: tuple[tuple[Node, Price], ...],
    every: Iterable[Node],
    largest: Iterable[Node],
    pricer: Pricer,
    latency_s_range: tuple[float, float] | None,
) -> Estimate:
    """every: all nodes that are run; largest: those of them that do the most, which tell what lies outside the data."""
    extrapolations = {node.op: pricer.extrapolation(node.op) for node, _ in by_op}
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
        extrapolations=tuple(extrapolations[node.op] for node, _ in by_op),
        latency_s_range=latency_s_range,
        range_over=pricer.range_over,
        prior_share=pricer.prior_share(every),
        extrapolated=pricer.extrapolated(largest),
    )


def _prices(nodes: Iterable[Node], pricer: Pricer) -> dict[Op, Price]:
    """The price of every op there is."""
    prices: dict[Op, Price] = {}
    for node in nodes:
        if node.op not in prices:  # layers repeat their ops
            try:
                prices[node.op] = pricer.price(node.op)
            except UserError as error:
                raise type(error)(f"op {node.name!r} must have a price: {error}") from None
    return prices
