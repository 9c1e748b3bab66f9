"""How two prices differ: op by op, and on which network they are equal.

    latency = compute seconds + waited bits / bandwidth + rounds x RTT / 2

is a plane in 1 / bandwidth and RTT, so that two of them meet in a line. The line is given by its two points with the
one property, or the other, of the network at hand.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from costmodel.cost import Price
from costmodel.estimate import Estimate
from costmodel.ops import Node, Op, OpGraph
from costmodel.protocols.derived import Derived

PROBE_BITS_PER_S = 1e6  # any finite bandwidth tells how many bits are waited for


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkUse:
    """What a latency is made of on any link of the same duplex."""

    compute_s: float
    waited_bits: float
    rounds: float

    def latency_s(self, bandwidth_bits_per_s: float, rtt_s: float) -> float:
        """Seconds on a link."""
        return self.compute_s + self.waited_bits / bandwidth_bits_per_s + self.rounds * rtt_s / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakEven:
    """Where two latencies are equal, and who is faster around it.

    at_bandwidth_bits_per_s, at_rtt_s: the network at hand.
    bandwidth_bits_per_s: at the network's own RTT; rtt_s: at its own bandwidth; None if one is faster at all of them.
    faster_below_bandwidth, faster_below_rtt: `first` or `second`, below that value; at every value if it is None, and
    `equal` where there is nothing between them.
    """

    at_bandwidth_bits_per_s: float
    at_rtt_s: float
    bandwidth_bits_per_s: float | None
    faster_below_bandwidth: str
    rtt_s: float | None
    faster_below_rtt: str


def network_use(graph: OpGraph, pricer: Derived) -> NetworkUse:
    """The parts of a graph's latency, from its prices on a probe of 1 Mbit/s without delay."""
    probe = replace(pricer, link=replace(pricer.link, bandwidth_bits_per_s=PROBE_BITS_PER_S, rtt_s=0.0))
    prices = [probe.price(node.op) for node in graph]
    return NetworkUse(
        compute_s=sum(price.compute_s or 0.0 for price in prices),
        waited_bits=sum(price.network_s or 0.0 for price in prices) * PROBE_BITS_PER_S,
        rounds=sum(price.rounds or 0 for price in prices),
    )


def break_even(first: NetworkUse, second: NetworkUse, *, at_bandwidth_bits_per_s: float, at_rtt_s: float) -> BreakEven:
    """Both points of the line on which two models take equally long."""
    bandwidth_bits_per_s, rtt_s = at_bandwidth_bits_per_s, at_rtt_s
    bits, rounds = first.waited_bits - second.waited_bits, first.rounds - second.rounds
    compute_s = first.compute_s - second.compute_s
    wait_s = bits / bandwidth_bits_per_s
    at_bandwidth = _positive(bits, -(compute_s + rounds * rtt_s / 2))
    at_rtt = _positive(-2 * (compute_s + wait_s), rounds)
    probed = bandwidth_bits_per_s if at_bandwidth is None else at_bandwidth / 2
    return BreakEven(
        at_bandwidth_bits_per_s=bandwidth_bits_per_s,
        at_rtt_s=rtt_s,
        bandwidth_bits_per_s=at_bandwidth,
        faster_below_bandwidth=_faster(first, second, probed, rtt_s),
        rtt_s=at_rtt,
        faster_below_rtt=_faster(first, second, bandwidth_bits_per_s, rtt_s if at_rtt is None else at_rtt / 2),
    )


def _positive(numerator: float, denominator: float) -> float | None:
    """A quotient that a property of a network can be."""
    value = numerator / denominator if denominator else math.inf
    return value if 0 < value < math.inf else None


def _faster(first: NetworkUse, second: NetworkUse, bandwidth_bits_per_s: float, rtt_s: float) -> str:
    latency_s, other_s = (use.latency_s(bandwidth_bits_per_s, rtt_s) for use in (first, second))
    return "equal" if latency_s == other_s else "first" if latency_s < other_s else "second"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An op that two estimates have in other numbers or at other prices.

    num_before, num_after: how often it is there. latency_s, sent_bytes: what the second takes less the first, so
    below 0 where it saves.
    """

    op: Op
    num_before: int
    num_after: int
    latency_s: float
    sent_bytes: float


def changes(before: Estimate, after: Estimate) -> tuple[Change, ...]:
    """All that differs, what saves most time first; together they are the difference of the totals."""
    first, second = _grouped(before.by_op), _grouped(after.by_op)
    changed = []
    for op in dict.fromkeys((*first, *second)):
        old, new = first.get(op, []), second.get(op, [])
        change = Change(
            op=op,
            num_before=len(old),
            num_after=len(new),
            latency_s=sum(price.latency_s for price in new) - sum(price.latency_s for price in old),
            sent_bytes=sum(price.sent_bytes for price in new) - sum(price.sent_bytes for price in old),
        )
        if change.num_before != change.num_after or change.latency_s or change.sent_bytes:
            changed.append(change)
    return tuple(sorted(changed, key=lambda change: (change.latency_s, change.sent_bytes)))


def _grouped(priced: Iterable[tuple[Node, Price]]) -> dict[Op, list[Price]]:
    groups: dict[Op, list[Price]] = {}
    for node, price in priced:
        groups.setdefault(node.op, []).append(price)
    return groups
