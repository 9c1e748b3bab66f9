"""`python -m costmodel diff`."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Literal

from rich.table import Table

from costmodel.commands.output import print_blocks, print_csv
from costmodel.config.units import format_bits_per_s, format_bytes, format_seconds
from costmodel.data_range import describe
from costmodel.difference import BreakEven, Change, break_even, changes, network_use
from costmodel.ops import shape
from costmodel.pricing.asked import asked_model
from costmodel.pricing.price import price
from costmodel.pricing.priced import PricedModel
from costmodel.protocols.derived import Derived
from costmodel.protocols.primitives import Holder
from costmodel.report.estimates import total_document
from costmodel.report.tables import table
from costmodel.report.trust import trust_document
from costmodel.trust import described


def diff(
    a: str,
    b: str,
    protocol: str = "published",
    versus: str | None = None,
    network: str | None = None,
    bandwidth: str | None = None,
    rtt: str | None = None,
    weights: Holder | None = None,
    format: Literal["table", "json", "csv"] = "table",
    **model: Any,
) -> None:
    """Say what makes B cheaper than A, op by op, and on which network they break even.

    The same architecture twice, with --versus, compares two protocols.

    Args:
        a: an architecture, as `estimate` takes it.
        b: another one.
        protocol: published, semi2k, aby3, cheetah, sigma or crypten.
        versus: the protocol of B, if it is another one.
        network: a named network or a .yaml file, as `estimate` takes it.
        bandwidth: of the link, with a unit, such as 1Gbps, instead of the network's.
        rtt: of the link, with a unit, such as 4ms, instead of the network's.
        weights: secret-shared (the default), or held by the server alone.
        format: tables for people, one JSON document, or CSV, a line an op; in SI units.
    """
    asked = (asked_model(a, **model), asked_model(b, **model))
    on: dict[str, Any] = {"network": network, "bandwidth": bandwidth, "rtt": rtt, "weights": weights}
    first, second = price(asked[0], protocol=protocol, **on), price(asked[1], protocol=versus or protocol, **on)
    differing, even = changes(first.estimate, second.estimate), _break_even(first, second)
    if format == "json":
        print(json.dumps(_document(first, second, differing, even), allow_nan=False))
    elif format == "csv":
        print_csv([_change_record(change) for change in differing])
    else:
        print_blocks([*_summary(first, second), *_break_even_lines(even)], [_changes_table(differing)])


def _break_even(first: PricedModel, second: PricedModel) -> BreakEven | None:
    """None where a network is fitted in."""
    before, after = first.pricer, second.pricer
    if not (isinstance(before, Derived) and isinstance(after, Derived)):
        return None
    return break_even(
        network_use(first.graph, before),
        network_use(second.graph, after),
        at_bandwidth_bits_per_s=before.link.bandwidth_bits_per_s,
        at_rtt_s=before.link.rtt_s,
    )


def _document(
    first: PricedModel, second: PricedModel, differing: Sequence[Change], even: BreakEven | None
) -> dict[str, Any]:
    """The difference as JSON data, second less first, in SI numbers; `changes` sum to the difference of the totals."""
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
        "break_even": even and {key: _finite(value) for key, value in asdict(even).items()},
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity, which the bandwidth of loopback is."""
    return None if value == math.inf else value


def _change_record(change: Change) -> dict[str, Any]:
    """One line of JSON or CSV."""
    return {
        "op": type(change.op).__name__,
        "shape": shape(change.op),
        "num_before": change.num_before,
        "num_after": change.num_after,
        "latency_s": change.latency_s,
        "sent_bytes": change.sent_bytes,
    }


def _summary(first: PricedModel, second: PricedModel) -> list[str]:
    """Both prices, how far apart they are, and whom they trust."""
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


def _break_even_lines(even: BreakEven | None) -> list[str]:
    """Which of both is faster on which side of the network at hand."""
    if even is None:
        return []
    rtt, bandwidth = f"{even.at_rtt_s * 1e3:g} ms", format_bits_per_s(even.at_bandwidth_bits_per_s)
    return [
        f"break-even at a round trip of {rtt}: "
        + _sides(
            even.faster_below_bandwidth,
            None if even.bandwidth_bits_per_s is None else format_bits_per_s(even.bandwidth_bits_per_s),
            "bandwidth",
        ),
        f"break-even at {bandwidth}: "
        + _sides(even.faster_below_rtt, None if even.rtt_s is None else f"{even.rtt_s * 1e3:.3g} ms", "round trip"),
    ]


def _sides(faster: str, value: str | None, what: str) -> str:
    if faster == "equal":
        return "both take equally long"
    below, above = ("A", "B") if faster == "first" else ("B", "A")
    return f"{below} is faster at every {what}" if value is None else f"{below} is faster below {value}, {above} above"


def _changes_table(differing: Iterable[Change]) -> Table:
    """Ops that differ, the greatest saving of time first."""
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
