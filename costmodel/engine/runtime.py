"""The interface of an engine in a party's process: it stores shares as named variables, and runs ops on them."""

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
    """Give freed memory back to the operating system, so that it does not count as resident, if the C library can."""
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def reset_peak() -> None:
    """Set this process's peak memory to what is resident now, if Linux allows it."""
    with suppress(OSError):
        RESET.write_text(RESET_PEAK)


class Traffic(NamedTuple):
    """Bytes and messages that a party sent in an op, and rounds that it waited for (None if they are not counted)."""

    sent_bytes: int
    messages: int
    rounds: int | None = None


class Runtime(ABC):
    """An engine in one party's process. It defines the type of shares; a share of a public weight is all of it."""

    @abstractmethod
    def shares(self, value: Array, op: Op | None = None) -> list[Any]:
        """Return every computing party's share of a weight that `op` reads or, if `op` is None, of an input."""

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
        """Prepare to run these steps, such as by compiling them; called before `connect` and `hold`."""

    @abstractmethod
    def connect(self) -> None:
        """Connect to the runtimes of the other parties; all of them do this at the same time."""

    @abstractmethod
    def hold(self, values: Mapping[str, Any]) -> None:
        """Store this party's shares, given by name of the variable."""

    @abstractmethod
    def start(self) -> None:
        """Do the work that is needed once for all steps; called when the weights are stored, before the first step."""

    @abstractmethod
    def run(self, step: int, index: int, node: Node) -> None:
        """Run `node`, with this index in the step, on stored variables, and store its output under the node's name."""

    @abstractmethod
    def share(self, variable: str) -> Any:
        """Return this party's share of a variable; None at a dealer."""

    @abstractmethod
    def drop(self, variable: str) -> None:
        """Delete a variable."""

    @abstractmethod
    def traffic(self, num_ops: int) -> list[Traffic]:
        """Return the traffic of this party in each of the last `num_ops` ops, in order."""

    def peak_bytes(self) -> int | None:
        """Return the peak of this process's resident bytes since `reset_peak`; None if the system does not tell."""
        try:
            lines = PEAK.read_text().splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)

    @abstractmethod
    def stop(self) -> None:
        """End the runtime once this party's messages have arrived; all parties call this at the same time."""
