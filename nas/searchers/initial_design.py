"""The first candidates of a search: published rows, and cheap architectures that keep some sub-layers of each kind.

Attention and ReLU FFNs stay in the first layers, as in the papers' `_ip` rows (arXiv 2410.13060). The builtin parent
needs these most: its loss rises by 6.6 nats without the first FFN, by 1.5 without the first attention, and by at most
0.11 without any other FFN or an attention of the last eight layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from costmodel.protocols.published import published_rows
from nas.searchers.draws import IDLE_SHARE
from search_spaces.architecture import Layer
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.budget.priced_space import cheapest, most_expensive, price_of
from search_spaces.deployed import deployed_id
from search_spaces.forms import Attention, Ffn, Norm
from search_spaces.notation import Member, parse
from search_spaces.space import SearchSpace, contains, member_of

MOST_INITIAL = 9  # two thirds of the default number of trials; the rest are offspring
MOST_SHALLOW = 5  # of MOST_INITIAL, those with fewer layers, all of them with attention and an FFN
# in order of preference; the first one that the space has is used, and frozen norms are present while training
FOLDING_NORMS: tuple[Norm, ...] = ("frozen-layernorm", "frozen-rmsnorm", "none")
CHEAP_FFNS: tuple[Ffn, ...] = ("relu", "quadglu", "square", "bilinear")


def published_members(space: SearchSpace) -> tuple[Member, ...]:
    """Return the papers' rows that belong to the space, in the papers' order, without duplicates."""
    if not space.base.block_facts.has_centred_norms:  # the papers' rows have LayerNorm
        return ()
    notations = [row.notation for row in published_rows() if row.num_layers == space.base.num_layers]
    members = [parse(notation, space.base) for notation in dict.fromkeys(notations)]
    return tuple(member for member in members if contains(space, member))


def initial_design(feasible: FeasibleSpace, published: Sequence[Member]) -> list[Member]:
    """Return the first candidates of a search, all within the budget, in an order that covers all costs early.

    First come models of fewer layers, each with attention and a ReLU FFN. Then the model farthest in cost from those
    chosen so far is taken, repeatedly. Models have attention in all layers and ReLU FFNs in the first 1, 3, 5 ...
    of them, the same with fewer layers or half the heads, and published rows. There are at most MOST_INITIAL, one per
    folded form, and none from the cheapest IDLE_SHARE of the range of costs. If none is left, the cheapest member is
    returned. With costs of the unfolded form, the initial design is all published rows and the cheapest member.
    """
    least = cheapest(feasible.priced)
    if feasible.priced.cost_of == "unfolded":
        return list(dict.fromkeys(member for member in (*published, least) if feasible.fits(member)))
    space, depth = feasible.space, feasible.space.base.num_layers
    shallow = [_first_layers(space, count, count) for count in range(1, depth + 1)]
    some_ffns = [_first_layers(space, count, num) for count in range(depth, 1, -1) for num in range(1, count, 2)]
    some_ffns += [_first_layers(space, depth, num_ffns, "softmax-half") for num_ffns in range(1, depth, 2)]
    chosen = _spread(feasible, [], _known(feasible, shallow), MOST_SHALLOW)
    chosen = _spread(feasible, chosen, _known(feasible, [*some_ffns, *reversed(published)], chosen), MOST_INITIAL)
    return _spread(feasible, [], chosen, len(chosen)) or [least]


def _first_layers(
    space: SearchSpace, num_attention: int, num_ffns: int, attention: Attention = "softmax"
) -> Member | None:
    """Build a member with attention and cheap FFNs in the first layers, or return None if the space has none."""
    kept = space.definition.first_layers
    for norm, ffn in product(FOLDING_NORMS, CHEAP_FFNS):
        alone = Layer(norm1=norm, attention=attention, ffn="none")
        both = replace(alone, norm2=norm, ffn=ffn)
        empty = Layer(attention="none", ffn="none")
        layers = (both,) * num_ffns + (alone,) * (num_attention - num_ffns)
        layers += (empty,) * (space.base.num_layers - num_attention)
        layers = (*kept, *layers[len(kept) :])
        if set(layers).issubset(space.layers):
            member = member_of(space, layers, entropy_regularised=space.recipes[0])
            if contains(space, member):
                return member
    return None


def _known(feasible: FeasibleSpace, members: Sequence[Member | None], others: Sequence[Member] = ()) -> list[Member]:
    """Drop members over budget, too cheap, or with the folded form of an earlier member or of one of `others`."""
    low, high = (price_of(feasible.priced, pick(feasible.priced)).latency_s for pick in (cheapest, most_expensive))
    least_s = low + IDLE_SHARE * (min(high, feasible.budget.latency_s or high) - low)
    forms, known = {deployed_id(member.architecture) for member in others}, []
    for member in members:
        if member is None or not feasible.fits(member) or price_of(feasible.priced, member).latency_s < least_s:
            continue
        if (form := deployed_id(member.architecture)) not in forms:
            forms.add(form)
            known.append(member)
    return known


def _spread(feasible: FeasibleSpace, chosen: Sequence[Member], members: Sequence[Member], most: int) -> list[Member]:
    """Add the member farthest in cost from those chosen, the most expensive first, until there are `most`."""
    prices = {member: price_of(feasible.priced, member).latency_s for member in (*chosen, *members)}
    spread, left = list(chosen), list(members)

    def gap(member: Member) -> float:
        return min((abs(prices[member] - prices[other]) for other in spread), default=prices[member])

    while left and len(spread) < most:
        spread.append(max(left, key=gap))
        left.remove(spread[-1])
    return spread
