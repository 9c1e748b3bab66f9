"""Peak memory of the parties' processes, as lines and JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from costmodel.config.units import format_bytes
from costmodel.execution.memory import PeakMemory


def memory_document(memory: PeakMemory | None) -> dict[str, Any] | None:
    """Predicted; null where nobody measured what a process takes."""
    return None if memory is None else asdict(memory)


def memory_line(memory: PeakMemory) -> str:
    beyond = f", {memory.extrapolation:.1f}x beyond what was measured" if memory.extrapolation > 1 else ""
    return (
        f"peak memory of a party {format_bytes(memory.party_bytes)}, of the first one, which also compiles and shares, "
        f"{format_bytes(memory.client_bytes)}; shares of it {format_bytes(memory.held_bytes)} "
        f"(held-out error {memory.held_out_error:.0%}{beyond})"
    )


def compared_line(memory: PeakMemory | None, measured: Sequence[int | None]) -> str:
    """Predicted against measured, the first party's first."""
    known = [each for each in measured if each is not None]
    if len(known) < 2:
        return "peak memory: not measured on this system"
    found = f"measured {format_bytes(max(known[1:]))} and {format_bytes(known[0])}"
    where = "peak memory of a party, and of the first one, which also compiles and shares"
    if memory is None:
        return f"{where}: {found}; none predicted with these flags"
    errors = [memory.party_bytes / max(known[1:]) - 1, memory.client_bytes / known[0] - 1]
    told = f"{format_bytes(memory.party_bytes)} and {format_bytes(memory.client_bytes)}"
    return f"{where}: predicted {told}, {found} ({errors[0]:+.1%}, {errors[1]:+.1%})"
