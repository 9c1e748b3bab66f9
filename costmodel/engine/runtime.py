"""The interface of an engine to a party: it stores shares of named variables, and runs the ops of a session on them.

The peak memory of a party's process is as Linux counts it; on other systems it is unknown.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from costmodel.engine.channel import Blob
from costmodel.execution.op_functions import Array
from costmodel.ops import Node, Op, OpGraph

PEAK, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc_pid_clear_refs(5): the resident memory becomes the peak


def give_back() -> None:
    """Return freed memory to the system, so that it does not count as resident, if the C library can do so."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def reset_peak() -> None:
    """Reset this process's peak to the memory that is resident now, if Linux allows it."""
    with suppress(OSError):
        RESET.write_text(RESET_PEAK)


class Traffic(NamedTuple):
    """What a party sent in an op, and the rounds for which it waited (None if they are not counted)."""

    sent_bytes: int
    messages: int
    rounds: int | None = None


class Runtime(ABC):
    """One party's runtime. A share is what the engine makes of an array, in its own type; a dealer has no shares."""

    @abstractmethod
    def shares(self, value: Array, op: Op | None = None) -> list[Any]:
        """Return every computing party's share of an input or, with the op that reads it, of a weight."""

    @abstractmethod
    def packed(self, share: Any) -> list[bytes]:
        """Return a share as bytes that can be sent."""

    @abstractmethod
    def unpacked(self, parts: Sequence[Blob]) -> Any:
        """Return the share that `packed` turned into bytes."""

    @abstractmethod
    def opened(self, shares: Sequence[Any]) -> Array:
        """Return the array that the shares of all computing parties reconstruct."""

    @abstractmethod
    def prepare(self, steps: tuple[OpGraph, ...]) -> None:
        """Prepare the programs of all steps, before weights arrive."""

    @abstractmethod
    def connect(self) -> None:
        """Connect to the runtimes of the other parties; all of them do this at the same time."""

    @abstractmethod
    def hold(self, values: Mapping[str, Any]) -> None:
        """Store this party's shares, given by variable."""

    @abstractmethod
    def start(self) -> None:
        """Do once what all steps need. This is called when the weights are stored, before the first step."""

    @abstractmethod
    def run(self, step: int, index: int, node: Node) -> None:
        """Run `node`, the op with this index in a step, on stored variables, and store its output under its name."""

    @abstractmethod
    def share(self, variable: str) -> Any:
        """Return this party's share of a variable; None at a dealer."""

    @abstractmethod
    def drop(self, variable: str) -> None:
        """Delete a variable."""

    @abstractmethod
    def traffic(self, num_ops: int) -> list[Traffic]:
        """Return what this party sent in each of the last `num_ops` ops."""

    def peak_bytes(self) -> int | None:
        """Return the most bytes of this process that were resident at once since `reset_peak`; None if unknown."""
        try:
            lines = PEAK.read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)

    @abstractmethod
    def stop(self) -> None:
        """End the runtime, once all that was sent has arrived; all parties do this at the same time."""
