"""Parses text with units (`5min`, `8GB`, `1Gbps`) into seconds, bytes and bits per second, and formats numbers."""

import math
import re
from contextlib import suppress
from decimal import Decimal

from costmodel.cost import Budget
from costmodel.errors import UserError

SECONDS: dict[str, float] = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTES: dict[str, float] = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}

BITS_PER_S: dict[str, float] = {"bps": 1.0, "kbps": 1e3, "Mbps": 1e6, "Gbps": 1e9, "Tbps": 1e12}

_QUANTITY = re.compile(r"\s*(?P<number>[-+0-9.eE]+|[-+]?(?:nan|inf(?:inity)?))\s*(?P<unit>[A-Za-z]*|%)\s*", re.ASCII)


def parse_seconds(text: str, subject: str) -> float:
    """Return the seconds of a positive duration such as `5min`; raise a UserError about `subject` for other text."""
    return _parse(text, subject, SECONDS, "300s or 5min")


def parse_bytes(text: str, subject: str) -> float:
    """Return the bytes of a positive size such as `8GB` (8e9); raise a UserError about `subject` for other text."""
    return _parse(text, subject, BYTES, "800MB or 8GB")


def parse_budget(latency: str | None, comm: str | None, keys: str | None) -> Budget:
    """Return the budget from the values of --budget-latency, --budget-comm and --budget-keys; None is no bound."""
    return Budget(
        latency_s=None if latency is None else parse_seconds(latency, "--budget-latency"),
        sent_bytes=None if comm is None else parse_bytes(comm, "--budget-comm"),
        key_bytes=None if keys is None else parse_bytes(keys, "--budget-keys"),
    )


def parse_bits_per_s(text: str, subject: str) -> float:
    """Return the bits per second of a bandwidth such as `1Gbps`; raise a UserError about `subject` for other text."""
    return _parse(text, subject, BITS_PER_S, "100Mbps or 1Gbps")


def parse_share(text: str, subject: str) -> float:
    """Return a percentage above 0 and up to `100%` as a fraction; raise a UserError about `subject` for other text."""
    share = _parse(text, subject, {"%": 0.01}, "60%")
    if share > 1:
        raise UserError(f"{subject} must be at most 100%, all that the parent takes, but got {text!r}.")
    return share


def parse_delay(text: str, subject: str) -> float:
    """Return the seconds of a duration of at least 0, such as `4ms`; raise a UserError about `subject` otherwise."""
    return _parse(text, subject, SECONDS, "4ms or 0ms", zero=True)


def _parse(text: str, subject: str, units: dict[str, float], example: str, *, zero: bool = False) -> float:
    kind = "number of at least 0" if zero else "positive number"
    rule = f"{subject} must be a {kind} with a unit ({', '.join(units)}), such as {example}"
    match = _QUANTITY.fullmatch(text)
    with suppress(ValueError):
        if match is not None and match["unit"] in units:
            value = float(match["number"]) * units[match["unit"]]
            if math.isfinite(value) and (value > 0 or (zero and value == 0)):
                return value
    raise UserError(f"{rule}, but got {text!r}.")


def format_count(count: int) -> str:
    """Return a number as text: `1,048,576`, or from a billion on `2.1e29`."""
    return f"{count:,}" if count < 10**9 else f"{Decimal(count):.1e}".replace("e+", "e")


def format_seconds(seconds: float) -> str:
    """Return a duration as text, such as `12.3 s`, in minutes from 60 s on and in hours from 3,600 s on."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds:.3g} s"


def format_bytes(num_bytes: float) -> str:
    """Return a size as text, such as `6.43 GB` (1 GB = 1e9 bytes)."""
    for unit in ("TB", "GB", "MB", "kB"):
        if num_bytes >= BYTES[unit]:
            return f"{num_bytes / BYTES[unit]:.2f} {unit}"
    return f"{num_bytes:.0f} B"
