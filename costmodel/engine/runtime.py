"""What a party computes with, whatever the engine: it holds values by variable and runs ops of a session on them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from costmodel.engine import memory
from costmodel.engine.channel import Blob
from costmodel.execution.op_functions import Array
from costmodel.ops import Node, Op, OpGraph


class Traffic(NamedTuple):
    """What a party sent in an op. rounds: that it waited for; None where the engine does not count them."""

    sent_bytes: int
    messages: int
    rounds: int | None = None


class Runtime(ABC):
    """One party's. Shares are whatever the engine makes of an array; parties beyond those that compute have none."""

    @abstractmethod
    def shares(self, value: Array, op: Op | None = None) -> list[Any]:
        """Every computing party's share of an input or, with the op that reads it, of a weight."""

    @abstractmethod
    def packed(self, share: Any) -> list[bytes]:
        """A share as bytes, to travel."""

    @abstractmethod
    def unpacked(self, parts: Sequence[Blob]) -> Any:
        """The share that `packed` gave."""

    @abstractmethod
    def opened(self, shares: Sequence[Any]) -> Array:
        """The array that the computing parties' shares are of."""

    @abstractmethod
    def prepare(self, steps: tuple[OpGraph, ...]) -> None:
        """Makes ready what is run, before weights have come."""

    @abstractmethod
    def connect(self) -> None:
        """Links it with the others', all parties at once."""

    @abstractmethod
    def hold(self, values: Mapping[str, Any]) -> None:
        """Takes shares by variable."""

    @abstractmethod
    def start(self) -> None:
        """Does once, before the first step, what all steps need, when it holds its weights."""

    @abstractmethod
    def run(self, step: int, index: int, node: Node) -> None:
        """Runs the op of a step that has that index."""

    @abstractmethod
    def share(self, variable: str) -> Any:
        """This party's share; None if it does not compute."""

    @abstractmethod
    def drop(self, variable: str) -> None:
        """Forgets a variable."""

    @abstractmethod
    def traffic(self, num_ops: int) -> list[Traffic]:
        """What it sent in each of the last so many ops."""

    def peak_bytes(self) -> int | None:
        """The most memory that it held in the last op; None where that is not known."""
        return memory.peak_bytes()

    @abstractmethod
    def stop(self) -> None:
        """Ends its links, after the others have said farewell."""
