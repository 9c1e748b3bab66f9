"""`python -m costmodel diff`: shows which ops make one model cheaper than another."""

import json
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Literal

from costmodel.config.units import format_bytes, format_seconds
from costmodel.cost import Price
from costmodel.data_range import describe
from costmodel.estimate import Estimate
from costmodel.ops import Op, shape
from costmodel.pricing.price import PricedModel, price
from costmodel.report.estimates import total_document, trust_document
from costmodel.report.tables import print_blocks, print_csv, table
from costmodel.trust import described


def diff(
    a: str,
    b: str,
    protocol: str = "published",
    versus: str | None = None,
    format: Literal["table", "json", "csv"] = "table",
    **options: Any,
) -> None:
    """Show how the cost of model B differs from that of model A, op by op.

    To compare two protocols, give the same architecture twice and --versus.

    Args:
        a: an architecture, as for `estimate`.
        b: the architecture to compare with.
        protocol: published, semi2k, aby3, cheetah, sigma, crypten, ckks, or module:Class of your own.
        versus: protocol of B, if it differs from A's.
        format: tables, one JSON document, or CSV with a line per op that differs; in SI units.
    """
    first, second = (
        price(model, protocol=under, testbed=None, weight_masks=None, threads=None, ring_bits=None,
              fraction_bits=None, new_tokens=None, **options)  # what is given here is no flag
        for model, under in ((a, protocol), (b, versus or protocol))
    )  # fmt: skip
    differing = changes(first.estimate, second.estimate)
    if format == "json":
        sides = {"first": _side(first), "second": _side(second)}
        print(json.dumps({"seq_len": first.asked.seq_len, **sides, "changes": differing}, allow_nan=False))
    elif format == "csv":
        print_csv(differing)
    else:
        rows = []
        for change in differing:
            dimensions = " ".join(f"{name}={value}" for name, value in change["shape"].items())
            counts = str(change["num_before"]), str(change["num_after"])
            seconds = _signed(change["latency_s"], format_seconds)
            rows.append([change["op"], dimensions, *counts, seconds, _signed(change["sent_bytes"], format_bytes)])
        shown = table(["op", "shape"], ["in A", "in B", "latency", "communication"], rows)
        print_blocks(_summary(first, second), [shown])


def changes(before: Estimate, after: Estimate) -> list[dict[str, Any]]:
    """Return a record of every distinct op whose count, latency or bytes differ, in SI units, largest saving first.

    `latency_s` and `sent_bytes` are after - before, over all uses of the op; records sum to the changes of the totals.
    """
    groups: tuple[dict[Op, list[Price]], dict[Op, list[Price]]] = {}, {}
    for group, estimate in zip(groups, (before, after), strict=True):
        for node, cost in estimate.by_op:
            group.setdefault(node.op, []).append(cost)
    records = []
    for op in dict.fromkeys((*groups[0], *groups[1])):
        old, new = (group.get(op, []) for group in groups)
        record = {
            "op": type(op).__name__,
            "shape": shape(op),
            "num_before": len(old),
            "num_after": len(new),
            "latency_s": sum(cost.latency_s for cost in new) - sum(cost.latency_s for cost in old),
            "sent_bytes": sum(cost.sent_bytes for cost in new) - sum(cost.sent_bytes for cost in old),
        }
        if len(old) != len(new) or record["latency_s"] or record["sent_bytes"]:
            records.append(record)
    return sorted(records, key=itemgetter("latency_s", "sent_bytes"))


def _side(priced: PricedModel) -> dict[str, Any]:
    return {
        "architecture": priced.name,
        "protocol": priced.estimate.protocol,
        "network": priced.estimate.network,
        "trust": trust_document(priced.trust),
        "total": total_document(priced.estimate),
    }


def _summary(first: PricedModel, second: PricedModel) -> list[str]:
    lines = []
    for letter, priced in zip("AB", (first, second), strict=True):
        network, outside = priced.estimate.network, describe(priced.estimate.extrapolated)
        lines.append(
            f"{letter}: {priced.name}, T={first.asked.seq_len}, protocol {priced.estimate.protocol}"
            f"{f' on {network}' if network else ''}: latency {format_seconds(priced.latency_s)}, communication "
            f"{format_bytes(priced.sent_bytes)}{outside and f'; {outside}'}"
        )
    seconds = _signed(second.latency_s - first.latency_s, format_seconds)
    lines.append(
        f"B less A: latency {seconds} ({_relative(first.latency_s, second.latency_s)}), communication "
        f"{_signed(second.sent_bytes - first.sent_bytes, format_bytes)} "
        f"({_relative(first.sent_bytes, second.sent_bytes)})"
    )
    trusts = [described(priced.trust) + priced.asked.whose for priced in (first, second)]
    return [*lines, *(f"trust: {trust}" for trust in dict.fromkeys(trusts))]


def _signed(difference: float, shown: Callable[[float], str]) -> str:
    return f"{'-' if difference < 0 else '+'}{shown(abs(difference))}"


def _relative(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else "none before"
