"""A search space with a price on every vertex: a member costs the sum over its path, so nothing is priced twice.

The embedding is charged to the source, each layer to its choice, the final norm and the vocabulary projection to
the head. Every vertex also carries its cost as integers, for counting: in units of 2^-38 s (4e-12 s) and 2^-4 bytes,
each op rounded to the nearest, so that equal ops make equal sums in whatever layers they stand.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from costmodel.cost import Price, total_price
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.ops import LayerId, Op
from search_spaces.architecture import Architecture, Layer
from search_spaces.budget.cost_counts import Cost
from search_spaces.graph import SINK, Choice, Head, Vertex, source
from search_spaces.lower import lower
from search_spaces.notation import Member
from search_spaces.space import SearchSpace, contains, member_at, member_of, num_members, path_of

Measure = Literal["latency_s", "sent_bytes"]
PriceOp: TypeAlias = Callable[[Op], Price]

UNITS_PER_S = 2.0**38
UNITS_PER_BYTE = 2.0**4
RELATIVE_TOLERANCE = 1e-9  # of a path's price against the op graph's: what summing in another order may change


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PricedSpace:
    """A space under a protocol and testbed, for prompts of `seq_len` tokens; made by `price_space`.

    prices, costs: of the source, of every choice and of every head; costs in the units above.
    num_ops: at least as many as any member has.
    """

    space: SearchSpace
    pricer: Pricer
    seq_len: int
    prices: dict[Vertex, Price] = field(repr=False)
    costs: dict[Vertex, Cost] = field(repr=False)
    num_ops: int


def price_space(space: SearchSpace, pricer: Pricer, seq_len: int) -> PricedSpace:
    """Prices every vertex once, by lowering architectures that repeat one layer.

    Raises UserError for a `seq_len` the base cannot take, an op without formula, a price that is not finite and
    non-negative, or prices that do not add up to those of whole op graphs.
    """
    price_op = _remembered(pricer)
    layers = dict.fromkeys(vertex.layer for vertex in space.graph if isinstance(vertex, Choice))
    by_layer = {layer: _op_prices(_uniform(space, layer), seq_len, price_op) for layer in layers}
    ops: dict[Vertex, list[Price]] = {source(space.graph): next(iter(by_layer.values()))["embed"]}
    for vertex in space.graph:
        if isinstance(vertex, Choice):
            ops[vertex] = by_layer[vertex.layer][vertex.depth]
        elif isinstance(vertex, Head):
            ops[vertex] = _op_prices(replace(space.base, final_norm=vertex.final_norm), seq_len, price_op)["head"]
    priced = PricedSpace(
        space=space,
        pricer=pricer,
        seq_len=seq_len,
        prices={vertex: total_price(prices) for vertex, prices in ops.items()},
        costs={vertex: _cost(prices) for vertex, prices in ops.items()},
        num_ops=(space.base.num_layers + 2) * max(map(len, ops.values())),
    )
    _check_additive(priced, price_op)
    return priced


def price_of(priced: PricedSpace, member: Member) -> Price:
    """The price of a member, equal to `estimate(lower(...)).total` to rounding.

    Raises UserError if it is not in the space.
    """
    if not contains(priced.space, member):
        raise UserError(f"only members of space {priced.space.name!r} are priced here, but got {member!r:.200}.")
    path = path_of(priced.space, member.architecture.layers)
    return total_price(priced.prices[vertex] for vertex in path if vertex in priced.prices)


def cheapest(priced: PricedSpace, measure: Measure = "latency_s") -> Member:
    """The member of least latency (or bytes), then least in the other; the first of several that are equal."""
    return _extreme(priced, measure, min)


def most_expensive(priced: PricedSpace, measure: Measure = "latency_s") -> Member:
    """The member of greatest latency (or bytes), then greatest in the other; the first of several that are equal."""
    return _extreme(priced, measure, max)


def _extreme(priced: PricedSpace, measure: Measure, pick: Callable[..., Vertex]) -> Member:
    """The shortest or longest path: the best way on from every vertex, sink first."""
    graph, other = priced.space.graph, "sent_bytes" if measure == "latency_s" else "latency_s"
    costs: dict[Vertex, tuple[float, float]] = {}
    onward: dict[Vertex, Vertex] = {}
    for vertex in reversed(list(graph)):
        own = priced.prices.get(vertex)
        cost = (getattr(own, measure), getattr(own, other)) if own else (0.0, 0.0)
        if vertex != SINK:
            onward[vertex] = pick(graph.succ[vertex], key=costs.__getitem__)
            rest = costs[onward[vertex]]
            cost = (cost[0] + rest[0], cost[1] + rest[1])
        costs[vertex] = cost
    layers, vertex = list[Layer](), source(graph)
    while vertex != SINK:
        vertex = onward[vertex]
        if isinstance(vertex, Choice):
            layers.append(vertex.layer)
    return member_of(priced.space, layers, entropy_regularised=priced.space.recipes[0])


def _uniform(space: SearchSpace, layer: Layer) -> Architecture:
    return replace(space.base, layers=(layer,) * space.base.num_layers)


def _op_prices(architecture: Architecture, seq_len: int, price_op: PriceOp) -> dict[LayerId, list[Price]]:
    parts: dict[LayerId, list[Price]] = {}
    for node in lower(architecture, seq_len):
        parts.setdefault(node.layer, []).append(price_op(node.op))
    return parts


def _cost(prices: Iterable[Price]) -> Cost:
    units = [(round(price.latency_s * UNITS_PER_S), round(price.sent_bytes * UNITS_PER_BYTE)) for price in prices]
    return sum(latency for latency, _ in units), sum(sent for _, sent in units)


def _remembered(pricer: Pricer) -> PriceOp:
    known: dict[Op, Price] = {}

    def price_op(op: Op) -> Price:
        if op not in known:
            known[op] = price = pricer.price(op)
            if not (0 <= price.latency_s < math.inf and 0 <= price.sent_bytes < math.inf):
                raise UserError(
                    f"prices under {pricer.protocol!r} must be finite and non-negative, but {op} has {price}."
                )
        return known[op]

    return price_op


def _check_additive(priced: PricedSpace, price_op: PriceOp) -> None:
    protocol, size = priced.pricer.protocol, num_members(priced.space)
    for member in (member_at(priced.space, index) for index in (0, size // 2, size - 1)):
        whole = total_price(price_op(node.op) for node in lower(member.architecture, priced.seq_len))
        parts = price_of(priced, member)
        if not _close(whole, parts, ("latency_s", "sent_bytes")):
            raise UserError(
                f"prices under {protocol!r} must add up over layers, but a member costs {whole} and its parts {parts}."
            )


def _close(first: Price, second: Price, measures: Iterable[Measure]) -> bool:
    return all(
        math.isclose(getattr(first, measure), getattr(second, measure), rel_tol=RELATIVE_TOLERANCE)
        for measure in measures
    )
