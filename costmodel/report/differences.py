"""Differences between two prices, for people (lines and tables) and programs (JSON and CSV)."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from costmodel.config.units import format_bits_per_s, format_bytes, format_seconds
from costmodel.difference.break_even import BreakEven
from costmodel.difference.by_op import Change
from costmodel.estimate import Estimate
from costmodel.ops import shape
from costmodel.report.estimates import total_document
from costmodel.report.tables import table
from costmodel.report.trust import trust_document
from costmodel.trust.adversary import described
from costmodel.trust.data_range import said


def document(
    names: tuple[str, str],
    estimates: tuple[Estimate, Estimate],
    changes: Sequence[Change],
    even: BreakEven | None,
    *,
    seq_len: int,
) -> dict[str, Any]:
    """The difference as JSON data, second less first, in SI numbers; `changes` sum to the difference of the totals."""
    first, second = (
        {
            "architecture": name,
            "protocol": one.protocol,
            "network": one.network,
            "trust": trust_document(one.trust),
            "total": total_document(one),
        }
        for name, one in zip(names, estimates, strict=True)
    )
    return {
        "seq_len": seq_len,
        "first": first,
        "second": second,
        "changes": [change_record(change) for change in changes],
        "break_even": even and {key: _finite(value) for key, value in asdict(even).items()},
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity, which the bandwidth of loopback is."""
    return None if value == math.inf else value


def change_record(change: Change) -> dict[str, Any]:
    """One line of JSON or CSV."""
    return {
        "op": type(change.op).__name__,
        "shape": shape(change.op),
        "num_before": change.num_before,
        "num_after": change.num_after,
        "latency_s": change.latency_s,
        "sent_bytes": change.sent_bytes,
    }


def summary(names: tuple[str, str], estimates: tuple[Estimate, Estimate], *, seq_len: int) -> list[str]:
    """Both prices, how far apart they are, and whom they trust."""
    lines = []
    for letter, name, one in zip("AB", names, estimates, strict=True):
        outside = said(one.extrapolated)
        lines.append(
            f"{letter}: {name}, T={seq_len}, protocol {one.protocol}{f' on {one.network}' if one.network else ''}: "
            f"latency {format_seconds(one.total.latency_s)}, communication {format_bytes(one.total.sent_bytes)}"
            f"{outside and f'; {outside}'}"
        )
    first, second = (priced.total for priced in estimates)
    seconds, sent = _signed(second.latency_s - first.latency_s, format_seconds), second.sent_bytes - first.sent_bytes
    lines.append(
        f"B less A: latency {seconds} ({_relative(first.latency_s, second.latency_s)}), communication "
        f"{_signed(sent, format_bytes)} ({_relative(first.sent_bytes, second.sent_bytes)})"
    )
    return [*lines, *(f"trust: {described(trust)}" for trust in dict.fromkeys(one.trust for one in estimates))]


def break_even_lines(even: BreakEven) -> list[str]:
    """Which of both is faster on which side of the network at hand."""
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


def changes_table(changes: Iterable[Change]) -> Table:
    """Ops that differ, the greatest saving of time first."""
    rows = []
    for change in changes:
        dimensions = " ".join(f"{name}={value}" for name, value in shape(change.op).items())
        seconds, num_bytes = _signed(change.latency_s, format_seconds), _signed(change.sent_bytes, format_bytes)
        counts = str(change.num_before), str(change.num_after)
        rows.append([type(change.op).__name__, dimensions, *counts, seconds, num_bytes])
    return table(["op", "shape"], ["in A", "in B", "latency", "communication"], rows)


def _signed(difference: float, shown: Callable[[float], str]) -> str:
    return f"{'-' if difference < 0 else '+'}{shown(abs(difference))}"


def _relative(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else "none before"
