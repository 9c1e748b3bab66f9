"""A search space with its costs: a member's cost is the sum over its path, so each distinct layer is priced only once.

The source has the cost of the embedding, each choice that of its layer, and the head that of final norm and vocabulary
projection; other vertices have no cost. Costs are means per new token of the workload. For counting, there are also
integer costs in units of 2^-38 s (4e-12 s) and 2^-4 bytes. The cost of each op is rounded, not that of a layer, so that
members with the same ops have the same integer cost, however their ops are spread over layers.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import networkx as nx

from costmodel.cost import Price, shared_price, total_price
from costmodel.errors import UnpricedOpError, UserError
from costmodel.estimate import Pricer, estimate_tokens
from costmodel.ops import LayerId, Node, Op, OpGraph
from costmodel.report.savings import Saving, savings
from search_spaces.architecture import Architecture, Layer
from search_spaces.deployed import Region, deployed, deployed_layer, with_folded_settings
from search_spaces.forms import LIVE_NORMS
from search_spaces.graph import SINK, Choice, Cost, Head, Vertex, added, after, source
from search_spaces.lower import Workload, lower
from search_spaces.notation import Member
from search_spaces.space import (
    Choices,
    SearchSpace,
    build_space,
    member_at,
    member_of,
    num_members,
    path_of,
    path_of_member,
)

Measure = Literal["latency_s", "sent_bytes", "key_bytes"]
CostForm = Literal["folded", "unfolded"]

UNITS_PER: dict[Measure, float] = {"latency_s": 2.0**38, "sent_bytes": 2.0**4, "key_bytes": 2.0**4}
EMPTY_LAYER = Layer(attention="none", ffn="none")
BARE = Head(final_norm="none", is_capped=False)
FREE = Price(
    latency_s=0.0, sent_bytes=0.0, rounds=0, messages=0, online_bytes=0, setup_bytes=0, compute_s=0, network_s=0,
    key_bytes=0,
)  # fmt: skip
RELATIVE_TOLERANCE = 1e-9  # of the sum over a path against the sum over an op graph, which has another order


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PricedSpace:
    """A space with its costs under a protocol and testbed, for a workload, made by `price_space`.

    cost_of: Whether costs are those of the folded or the unfolded members.
    prices: Costs per new token of the source, every choice and every head. costs: The same as integers, in the units
        of `UNITS_PER`, for each of its measures (0 if the protocol does not have the measure).
    num_ops: An upper bound on the number of ops that a member's cost is a sum of.
    """

    space: SearchSpace
    pricer: Pricer
    workload: Workload
    cost_of: CostForm
    prices: dict[Vertex, Price] = field(repr=False)
    costs: dict[Vertex, Cost] = field(repr=False)
    num_ops: int

    @property
    def seq_len(self) -> int:
        """Number of tokens of the prompt."""
        return self.workload.prompt_len


def price_space(
    space: SearchSpace, pricer: Pricer, workload: Workload | int, cost_of: CostForm = "folded"
) -> PricedSpace:
    """Return the space with its costs. Each distinct layer is priced once, in a model whose layers all equal it.

    An integer `workload` is the length of a prompt in tokens, for one new token. A UserError is raised for a workload
    or a layer that the base does not support, an op without formula, a cost that is not finite and non-negative, or
    costs of parts that do not add up to those of whole op graphs.
    """
    work = Workload(prompt_len=workload) if isinstance(workload, int) else workload
    layer_prices = LayerPrices(space.base, pricer, work, cost_of)
    ops = layer_prices.by_vertex(space.graph, lambda choice: priced_layer(space, choice, cost_of))
    lists = {id(prices): prices for prices in ops.values()}  # layers repeat their prices
    sums = {key: _sum(prices, work.new_tokens) for key, prices in lists.items()}
    priced = PricedSpace(
        space=space,
        pricer=pricer,
        workload=work,
        cost_of=cost_of,
        prices={vertex: sums[id(prices)] for vertex, prices in ops.items()},
        costs=_costs(ops, work.new_tokens),
        num_ops=(space.base.num_layers + 2) * max(map(len, ops.values())),
    )
    _check_additive(priced, layer_prices)
    return priced


def extrapolated(priced: PricedSpace, member: Member) -> tuple[str, ...]:
    """Return in words the parts of a member's op graphs that are outside the data that the costs were fitted on."""
    graphs = graphs_of(priced, member)
    return tuple(dict.fromkeys(text for graph in graphs for text in priced.pricer.extrapolated(graph)))


def graphs_of(priced: PricedSpace, member: Member) -> list[OpGraph]:
    """Return an op graph per new token of a member, or of the folded member if costs of the space are folded."""
    whole = member.architecture
    return priced.workload.graphs(deployed(whole) if priced.cost_of == "folded" else whole)


class LayerPrices:
    """The costs of the ops of embedding, layers and heads, in models with the base's dimensions.

    The ops of each distinct layer or head are made only once.
    """

    def __init__(self, base: Architecture, pricer: Pricer, workload: Workload, cost_of: CostForm) -> None:
        self.base = with_folded_settings(base) if cost_of == "folded" else base
        self.workload = workload
        # of the first run, which makes the masks that later runs reuse, and of these
        self.pricers = (pricer.of_first_run if workload.new_tokens > 1 else pricer, pricer)
        self._prices: dict[tuple[Op, bool], Price] = {}
        self._known: dict[tuple[Layer, Head], dict[LayerId, list[Price]]] = {}
        self._lists: dict[tuple[int, ...], list[Price]] = {}  # by the ids of their prices, each list once

    def priced(self, graphs: Iterable[OpGraph], *, layers: bool = True) -> list[tuple[Node, Price]]:
        """Return nodes with their costs: all nodes or, if `layers` is False, those of embedding and head."""

        def is_wanted(node: Node) -> bool:
            return layers or not isinstance(node.layer, int)

        def price_node(node: Node, is_later: bool) -> Price:  # an op that is not wanted may have no formula
            return self._price_op(node.op, is_later) if is_wanted(node) else FREE

        priced: list[tuple[Node, Price]] = []
        for index, graph in enumerate(graphs):
            is_later = index > 0
            prices = self.pricers[is_later].prices(graph.nodes, partial(price_node, is_later=is_later))
            priced += zip(graph.nodes, prices, strict=True)
        return [(node, price) for node, price in priced if is_wanted(node)]

    def _price_op(self, op: Op, is_later: bool) -> Price:
        if (op, is_later) not in self._prices:
            pricer = self.pricers[is_later]
            self._prices[op, is_later] = price = pricer.price(op)
            if not all(0 <= (getattr(price, measure) or 0) < math.inf for measure in UNITS_PER):
                raise UserError(
                    f"prices under {pricer.protocol!r} must be finite and non-negative, but {op} has {price}."
                )
        return self._prices[op, is_later]

    def of_layer(self, layer: Layer, depth: int) -> list[Price]:
        """Return the costs of the ops of a layer at a depth; an empty list for a layer that computes nothing."""
        return self._parts(layer, BARE).setdefault(depth, [])

    def by_vertex(self, graph: nx.DiGraph, layer_of: Callable[[Choice], Layer]) -> dict[Vertex, list[Price]]:
        """Return vertex -> costs of its ops, for source, choices and heads. layer_of: choice -> layer to price."""
        ops: dict[Vertex, list[Price]] = {source(graph): self._parts(EMPTY_LAYER, BARE).get("embed", [])}
        for vertex in graph:
            if isinstance(vertex, Choice):
                ops[vertex] = self.of_layer(layer_of(vertex), vertex.depth)
            elif isinstance(vertex, Head):
                is_kept = vertex.final_norm in LIVE_NORMS or not self.base.folded
                head = vertex if is_kept else replace(vertex, final_norm="none")
                ops[vertex] = self._parts(EMPTY_LAYER, head)["head"]
        return ops

    def _parts(self, layer: Layer, head: Head) -> dict[LayerId, list[Price]]:
        if (layer, head) not in self._known:
            is_empty = layer == EMPTY_LAYER  # then no deployment could name a layer, and no block be shaped
            layers = (self.base.layers[0] if is_empty else layer,) * self.base.num_layers
            cap = self.base.logit_cap if head.is_capped else None
            whole = replace(self.base, layers=layers, final_norm=head.final_norm, logit_cap=cap)
            parts: dict[LayerId, list[Price]] = {}
            for node, price in self.priced(self.workload.graphs(whole), layers=not is_empty):
                parts.setdefault(node.layer, []).append(price)
            shared = {at: self._lists.setdefault(tuple(map(id, prices)), prices) for at, prices in parts.items()}
            self._known[layer, head] = shared
        return self._known[layer, head]


def price_of(priced: PricedSpace, member: Member) -> Price:
    """Return the cost of a member per new token; raise UserError if the member is not in the space."""
    path = path_of_member(priced.space, member)
    if path is None:
        raise UserError(f"only members of space {priced.space.name!r} are priced here, but got {member!r:.200}.")
    return total_price(priced.prices[vertex] for vertex in path if vertex in priced.prices)


def price_by_part(priced: PricedSpace, member: Member) -> dict[str, Price]:
    """Return a member's costs of `embedding`, `layers` and `head`; raise UserError if the space lacks its layers."""
    prices: dict[str, list[Price]] = {"embedding": [], "layers": [], "head": []}
    for vertex in path_of(priced.space, member.architecture.layers):
        if vertex in priced.prices:
            part = "layers" if isinstance(vertex, Choice) else "head" if isinstance(vertex, Head) else "embedding"
            prices[part].append(priced.prices[vertex])
    return {part: total_price(parts) for part, parts in prices.items()}


def priced_layer(space: SearchSpace, choice: Choice, cost_of: CostForm) -> Layer:
    """Return the layer that is priced for a choice: the chosen layer, or its folded form if costs are folded."""
    if cost_of == "unfolded":
        return choice.layer
    ahead = not after(space.graph, choice).state[1]
    keeps_norm1 = space.base.block_facts.passes_values(choice.depth)
    return deployed_layer(space.base, choice.layer, Region(ahead=ahead, behind=False), keeps_norm1=keeps_norm1)


def cheapest(priced: PricedSpace, measure: Measure = "latency_s") -> Member:
    """Return the member of least `measure`; ties are broken by least latency, or sent bytes if `measure` is latency."""
    return _extreme(priced, measure, min)


def most_expensive(priced: PricedSpace, measure: Measure = "latency_s") -> Member:
    """Return the member of greatest `measure`; ties go to greatest latency, or sent bytes if `measure` is latency."""
    return _extreme(priced, measure, max)


def _extreme(priced: PricedSpace, measure: Measure, pick: Callable[..., Vertex]) -> Member:
    if measure == "key_bytes" and not priced.pricer.has_keys:
        raise UserError(f"`measure` must not be key_bytes, since protocol {priced.pricer.protocol} has no keys.")
    graph, other = priced.space.graph, "sent_bytes" if measure == "latency_s" else "latency_s"
    costs: dict[Vertex, tuple[float, float]] = {}
    onward: dict[Vertex, Vertex] = {}
    for vertex in reversed(list(graph)):
        price = priced.prices.get(vertex)
        cost = (getattr(price, measure), getattr(price, other)) if price else (0.0, 0.0)
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
    return member_of(priced.space, layers)


def _sum(prices: list[Price], num_shares: int) -> Price:
    return shared_price(total_price(prices or [FREE]), num_shares)


def _costs(ops: Mapping[Vertex, list[Price]], num_shares: int) -> dict[Vertex, Cost]:
    per_share = [units_per / num_shares for units_per in UNITS_PER.values()]
    free = (0,) * len(UNITS_PER)
    every = {id(price): price for prices in ops.values() for price in prices}
    units = {
        key: tuple(round((getattr(price, name) or 0) * per) for name, per in zip(UNITS_PER, per_share, strict=True))
        for key, price in every.items()
    }
    lists = {id(prices): prices for prices in ops.values()}
    sums = {key: added([free, *(units[id(price)] for price in prices)]) for key, prices in lists.items()}
    return {vertex: sums[id(prices)] for vertex, prices in ops.items()}


def _check_additive(priced: PricedSpace, layer_prices: LayerPrices) -> None:
    protocol, size = priced.pricer.protocol, num_members(priced.space)
    for member in (member_at(priced.space, index) for index in (0, size // 2, size - 1)):
        graphs = graphs_of(priced, member)
        ops = [price for _, price in layer_prices.priced(graphs)]
        whole, parts = _sum(ops, priced.workload.new_tokens), price_of(priced, member)
        pairs = [(getattr(whole, measure) or 0, getattr(parts, measure) or 0) for measure in UNITS_PER]
        if not all(math.isclose(*pair, rel_tol=RELATIVE_TOLERANCE) for pair in pairs):
            raise UserError(
                f"prices under {protocol!r} must add up over layers, but a member costs {whole} and its parts {parts}."
            )


def priceable(
    space: SearchSpace, pricer: Pricer, workload: Workload, cost_of: CostForm = "folded"
) -> tuple[SearchSpace, dict[str, str]]:
    """Return the space without the choices that the protocol has no formula for, and these choices with the reasons.

    The latter are a dict of choice, such as `ffn square` -> reason. A space that lists its members stays unchanged. A
    UserError is raised if no choice is left for some field of a layer, and otherwise as by `build_space` and, except
    for a missing formula, `price_space`.
    """
    choices = space.definition.choices
    if choices is None:
        return space, {}
    prices, left_out = LayerPrices(space.base, pricer, workload, cost_of), dict[str, str]()
    kept: dict[str, Any] = {}
    for kind in (choice.name for choice in fields(Choices)):
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
    least = "softmax" if prices.base.block_facts.is_shaped else "none"  # such a block needs its attention
    bare: dict[str, Any] = {
        "attention": usual["attention"] if place == "inner1" else least,
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


class PricedArchitecture(NamedTuple):
    """The cost per new token, and the pricer's `latency_s_range`, per new token too."""

    price: Price
    latency_s_range: tuple[float, float] | None


def price_architecture(
    architecture: Architecture, pricer: Pricer, workload: Workload, cost_of: CostForm
) -> PricedArchitecture:
    """Return the cost of an architecture for a workload; a folded architecture is priced as it is.

    A UserError is raised for a workload that the architecture does not support, or an op without formula.
    """
    graphs = workload.graphs(deployed(architecture) if cost_of == "folded" else architecture)
    whole, shares = estimate_tokens(graphs, pricer), workload.new_tokens
    bounds = whole.latency_s_range
    return PricedArchitecture(shared_price(whole.total, shares), bounds and (bounds[0] / shares, bounds[1] / shares))


def cheaper(architecture: Architecture, pricer: Pricer, workload: Workload, cost_of: CostForm) -> tuple[Saving, ...]:
    """Return the `savings` of an architecture: flags that lower its cost without changing its function."""
    return savings(
        partial(lower, deployed(architecture) if cost_of == "folded" else architecture),
        pricer,
        workload.deployment,
        prompt_len=workload.prompt_len,
        new_tokens=workload.new_tokens,
        makes_masks=workload.new_tokens > 1,
    )
