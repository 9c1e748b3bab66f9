"""Differences between two prices, for people (lines and tables) and programs (JSON and CSV)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from costmodel.config.units import format_bits_per_s, format_bytes, format_seconds
from costmodel.difference.break_even import BreakEven
from costmodel.difference.by_op import Change
from costmodel.estimate import Estimate
from costmodel.ops import shape
from costmodel.report.estimates import total_document
from costmodel.report.trust import trust_document
from costmodel.trust.adversary import described
from costmodel.trust.data_range import said


def document(
    names: tuple[str, str],
    estimates: tuple[Estimate, Estimate],
    found: Sequence[Change],
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
        "changes": [change_record(change) for change in found],
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
    first, second = (one.total for one in estimates)
    lines.append(
        f"B less A: latency {_signed_seconds(second.latency_s - first.latency_s)} "
        f"({_relative(first.latency_s, second.latency_s)}), communication "
        f"{_signed_bytes(second.sent_bytes - first.sent_bytes)} ({_relative(first.sent_bytes, second.sent_bytes)})"
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


def changes_table(found: Iterable[Change]) -> Table:
    """What differs, the greatest saving of time first."""
    table = Table(box=None, pad_edge=False)
    table.add_column("op", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    for title in ("in A", "in B", "latency", "communication"):
        table.add_column(title, justify="right")
    for change in found:
        dimensions = " ".join(f"{name}={value}" for name, value in shape(change.op).items())
        seconds, num_bytes = _signed_seconds(change.latency_s), _signed_bytes(change.sent_bytes)
        numbers = (str(change.num_before), str(change.num_after), seconds, num_bytes)
        table.add_row(type(change.op).__name__, dimensions, *numbers)
    return table


def _signed_seconds(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _signed_bytes(num_bytes: float) -> str:
    return f"{'-' if num_bytes < 0 else '+'}{format_bytes(abs(num_bytes))}"


def _relative(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else "none before"
