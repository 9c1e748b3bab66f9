"""`estimate` prices an op graph op by op under a protocol; `estimate_generation` prices a run for each new token."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from costmodel.cost import Price, total_price
from costmodel.data_range import describe
from costmodel.errors import UserError
from costmodel.ops import LayerId, Node, Op, OpGraph
from costmodel.trust import Trust

# Raise this by hand with every change of a formula, count, lowering or committed testbed that changes a cost: two costs
# are comparable if their ids are equal. `tests/costmodel/test_golden_prices.py` fails until it is raised.
COST_MODEL_VERSION = 6

# The engine whose source the formulas of semi2k, aby3 and cheetah follow and whose bytes they were compared with.
# Another version has other kernels, so its seconds do not go with these formulas.
ENGINE = "SecretFlow-SPU 0.9.5"


def cost_model_id(testbed: bytes, *parts: object) -> str:
    """Return `VERSION-HASH`: COST_MODEL_VERSION, and twelve hexadecimal digits of a hash of all arguments.

    testbed: content of the testbed file. parts: other values that the costs depend on.
    """
    content = b"\0".join((testbed, *(str(part).encode() for part in parts)))
    return f"{COST_MODEL_VERSION}-{hashlib.sha256(content).hexdigest()[:12]}"


class Pricer(ABC):
    """A protocol on a testbed and network, which prices ops from their dimensions and forms alone.

    protocol, network: Names on the command line; network is None if the costs were fitted for one network.
    cost_model_id: Identifies the costs: pricers with equal ids give every op equal costs.
    range_over: What the latency range accounts for, in words, such as `errors of the compute seconds`.
    has_keys: Whether a dealer sends each party keys before a run, so that `key_bytes` is not None.
    setting: How numbers are represented and who holds the weights; None if the protocol has no such choices.
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
        """Whom you must trust under the protocol, and who may be corrupted."""

    @property
    def of_first_run(self) -> "Pricer":
        """The pricer of the first of several runs, which makes the reused masks; an equal pricer if none are reused."""
        return self

    @abstractmethod
    def price(self, op: Op) -> Price:
        """Return the cost of one op; a UserError is raised if the protocol has no formula for it."""

    def prices(self, nodes: Sequence[Node], price_node: Callable[[Node], Price] | None = None) -> list[Price]:
        """Return the cost of every node of a run, in order.

        price_node: called instead of `price`, for example to price equal ops once. A protocol under which the cost of a
        node depends on the nodes around it ignores it.
        """
        return [price_node(node) if price_node else self.price(node.op) for node in nodes]

    def latency_s_range(self, graph: Iterable[Node]) -> tuple[float, float] | None:
        """Return the least and greatest latency (s) of a graph, by the errors expected of its costs; None if not known.

        The default is None.
        """
        return None

    def extrapolated(self, graph: Iterable[Node]) -> tuple[str, ...]:
        """Return the parts of a graph outside the data that costs were fitted on, in words.

        By default these are the types of op that are larger than any that was measured, with the ratio.
        """
        multiples: dict[str, float] = {}
        for op in dict.fromkeys(node.op for node in graph):
            name = type(op).__name__
            multiples[name] = max(multiples.get(name, 1.0), self.extrapolation(op) or 1.0)
        return tuple(f"{name} {times:.1f}x" for name, times in multiples.items() if times > 1)

    def extrapolation(self, op: Op) -> float | None:
        """Return an op's amount of work over the largest in the fitted data, at least 1; None if it is not known."""
        return None


def outside_data(pricer: Pricer, graphs: Iterable[OpGraph]) -> str:
    """Return in words the parts of op graphs outside the data that costs were fitted on; empty if there are none."""
    return describe(text for graph in graphs for text in pricer.extrapolated(graph))


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The costs of an op graph; `by_op` and `by_layer` sum to `total`.

    extrapolations: `Pricer.extrapolation` of every op in `by_op`. latency_s_range, extrapolated: results of the methods
    of `Pricer` with these names, for the whole graph. `Pricer` explains the other fields.
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
    extrapolated: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """The costs of new tokens, each from its own run.

    whole: the costs of all runs. Its nodes are those of the prompt's run, then those of the last token's run, named
        `NAME@decode`, each with the node's cost summed over all runs after the prompt's.
    by_token: the cost of each token's run.
    """

    whole: Estimate
    by_token: tuple[Price, ...]


def estimate(graph: OpGraph, pricer: Pricer) -> Estimate:
    """Return the costs of a graph under a protocol; a UserError is raised for an op without formula."""
    by_op = tuple(zip(graph, _prices(graph, pricer), strict=True))
    return _estimate(by_op, graph, pricer, pricer.latency_s_range(graph))


def estimate_generation(runs: Sequence[OpGraph], pricer: Pricer) -> Generation:
    """Return the costs of one run per new token; the first reads the prompt, and makes the reused masks, if any.

    A UserError is raised for an op without formula.
    """
    prompt, *steps = runs
    later = [node for run in steps for node in run]
    first, prices = _prices(prompt, pricer.of_first_run), _prices(later, pricer)
    by_op, size = list(zip(prompt, first, strict=True)), len(steps[0].nodes) if steps else 0
    for index in range(size):
        node = steps[-1].nodes[index]
        by_op.append((replace(node, name=f"{node.name}@decode"), total_price(prices[index::size])))
    if pricer.of_first_run == pricer:
        bounds = pricer.latency_s_range([*prompt, *later])
    else:  # priced apart
        apart = pricer.of_first_run.latency_s_range(prompt), pricer.latency_s_range(later)
        bounds = apart[0] and apart[1] and (apart[0][0] + apart[1][0], apart[0][1] + apart[1][1])
    return Generation(
        whole=_estimate(tuple(by_op), [node for node, _ in by_op], pricer, bounds),
        by_token=(
            total_price(first),
            *(total_price(prices[start : start + size]) for start in range(0, len(prices), size or 1)),
        ),
    )


def estimate_tokens(runs: Sequence[OpGraph], pricer: Pricer) -> Estimate:
    """Return the costs of an answer with one run per new token; a UserError is raised for an op without formula.

    Reused masks are made by the first of several runs; a single run is priced as if an earlier one had made them.
    """
    return estimate(runs[0], pricer) if len(runs) == 1 else estimate_generation(runs, pricer).whole


def _estimate(
    by_op: tuple[tuple[Node, Price], ...],
    largest: Iterable[Node],
    pricer: Pricer,
    latency_s_range: tuple[float, float] | None,
) -> Estimate:
    """Assemble an estimate; `largest` are the nodes that decide about extrapolation."""
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
        extrapolated=pricer.extrapolated(largest),
    )


def _prices(nodes: Iterable[Node], pricer: Pricer) -> list[Price]:
    prices: dict[Op, Price] = {}

    def price_node(node: Node) -> Price:
        if node.op not in prices:  # layers repeat their ops
            try:
                prices[node.op] = pricer.price(node.op)
            except UserError as error:
                raise type(error)(f"op {node.name!r} must have a price: {error}") from None
        return prices[node.op]

    return pricer.prices(tuple(nodes), price_node)
