"""`python -m costmodel diff`: shows which ops make one model cheaper than another."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from rich.table import Table

from costmodel.commands.output import print_blocks, print_csv
from costmodel.config.units import format_bytes, format_seconds
from costmodel.data_range import describe
from costmodel.difference import Change, changes
from costmodel.ops import shape
from costmodel.pricing.price import price
from costmodel.pricing.priced import PricedModel
from costmodel.report.estimates import total_document
from costmodel.report.tables import table
from costmodel.report.trust import trust_document
from costmodel.trust import described


def diff(
    a: str,
    b: str,
    protocol: str = "published",
    versus: str | None = None,
    format: Literal["table", "json", "csv"] = "table",
    **options: Any,
) -> None:
    """Show what makes B cheaper than A, op by op.

    To compare two protocols, give the same architecture twice and --versus.

    Args:
        a: an architecture, as for `estimate`.
        b: the architecture to compare with.
        protocol: published, semi2k, aby3, cheetah, sigma or crypten.
        versus: protocol of B, if it differs from A's.
        format: tables, one JSON document, or CSV with a line per op; in SI units.
    """
    first, second = (
        price(
            model,
            protocol=under,
            testbed=None,
            weight_masks=None,
            threads=None,
            ring_bits=None,
            fraction_bits=None,
            new_tokens=None,
            **options,
        )
        for model, under in ((a, protocol), (b, versus or protocol))
    )
    differing = changes(first.estimate, second.estimate)
    if format == "json":
        print(json.dumps(_document(first, second, differing), allow_nan=False))
    elif format == "csv":
        print_csv([_change_record(change) for change in differing])
    else:
        print_blocks(_summary(first, second), [_changes_table(differing)])


def _document(first: PricedModel, second: PricedModel, differing: Sequence[Change]) -> dict[str, Any]:
    """Return the difference B - A as JSON data in SI units; `changes` sum to the difference of the totals."""
    sides = [
        {
            "architecture": priced.name,
            "protocol": priced.estimate.protocol,
            "network": priced.estimate.network,
            "trust": trust_document(priced.trust),
            "total": total_document(priced.estimate),
        }
        for priced in (first, second)
    ]
    return {
        "seq_len": first.asked.seq_len,
        "first": sides[0],
        "second": sides[1],
        "changes": [_change_record(change) for change in differing],
    }


def _change_record(change: Change) -> dict[str, Any]:
    return {
        "op": type(change.op).__name__,
        "shape": shape(change.op),
        "num_before": change.num_before,
        "num_after": change.num_after,
        "latency_s": change.latency_s,
        "sent_bytes": change.sent_bytes,
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


def _changes_table(differing: Iterable[Change]) -> Table:
    rows = []
    for change in differing:
        dimensions = " ".join(f"{name}={value}" for name, value in shape(change.op).items())
        seconds, num_bytes = _signed(change.latency_s, format_seconds), _signed(change.sent_bytes, format_bytes)
        counts = str(change.num_before), str(change.num_after)
        rows.append([type(change.op).__name__, dimensions, *counts, seconds, num_bytes])
    return table(["op", "shape"], ["in A", "in B", "latency", "communication"], rows)


def _signed(difference: float, shown: Callable[[float], str]) -> str:
    return f"{'-' if difference < 0 else '+'}{shown(abs(difference))}"


def _relative(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else "none before"
