"""The difference between two costs, op by op."""

from collections.abc import Iterable
from dataclasses import dataclass

from costmodel.cost import Price
from costmodel.estimate import Estimate
from costmodel.ops import Node, Op


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """An op whose number or cost differs between two estimates.

    `num_before` and `num_after` count it. `latency_s` and `sent_bytes` are after - before, so negative for a saving.
    """

    op: Op
    num_before: int
    num_after: int
    latency_s: float
    sent_bytes: float


def changes(before: Estimate, after: Estimate) -> tuple[Change, ...]:
    """Return all differences, largest saving of time first; they sum to the difference of the totals."""
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
