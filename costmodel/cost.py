"""What a cost is, said once: the units and definitions every protocol, testbed and report uses.

round: one wait of a party for a message, on the program's critical path.
message: what an engine counts as a send.
sent_bytes: bytes that parties put on the wire, summed over all of them, online and setup; a dealer is no party.

Everything is in SI base units (bytes, seconds); minutes and GB (1e9 bytes) exist only in parsing and printing.
None means not known, never zero: a sum with an unknown part is unknown.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from costmodel.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """The cost of one op, a layer or a whole model.

    latency_s: seconds from prompt to token; compute_s and network_s are its parts where they can be told apart.
    sent_bytes: online_bytes and setup_bytes are its parts where they can be told apart.
    key_bytes: that each party receives from a dealer ahead of the run, and keeps until it; in no other field.
    rounds, messages: whole numbers, but for a mean over several new tokens.
    """

    latency_s: float
    sent_bytes: float
    rounds: float | None = None
    messages: float | None = None
    online_bytes: float | None = None
    setup_bytes: float | None = None
    compute_s: float | None = None
    network_s: float | None = None
    key_bytes: float | None = None


def total_price(prices: Iterable[Price]) -> Price:
    """The sum of prices, field by field; a field that any part does not know is None.

    Raises UserError if there is nothing to sum.
    """
    parts = list(prices)
    if not parts:
        raise UserError("a total needs at least one price, but got none.")
    sums: dict[str, Any] = {}
    for name in (field.name for field in fields(Price)):
        column = [getattr(part, name) for part in parts]
        sums[name] = None if None in column else sum(column)
    return Price(**sums)


def shared_price(price: Price, num_shares: int) -> Price:
    """One of equal shares of a price."""
    if num_shares == 1:
        return price
    values: dict[str, Any] = {field.name: getattr(price, field.name) for field in fields(Price)}
    shares: dict[str, Any] = {name: None if value is None else value / num_shares for name, value in values.items()}
    return Price(**shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Upper bounds a model must meet; None is no bound. What a price does not know is within no bound.

    Raises UserError if a bound is not positive and finite.
    """

    latency_s: float | None = None
    sent_bytes: float | None = None
    key_bytes: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            bound = getattr(self, field.name)
            if bound is not None and not 0 < bound < float("inf"):
                raise UserError(f"budget `{field.name}` must be positive and finite, but got {bound}.")

    def check_keys(self, protocol: str, *, has_keys: bool) -> None:
        """Raises UserError for a bound of keys under a protocol whose prices have none."""
        if self.key_bytes is not None and not has_keys:
            raise UserError(f"--budget-keys is of a dealer's keys, but protocol {protocol} has none; leave it out.")

    @property
    def bounds(self) -> dict[str, float]:
        """By name of the field."""
        return {field.name: bound for field in fields(self) if (bound := getattr(self, field.name)) is not None}

    def admits(self, **costs: float | None) -> bool:
        """Whether costs, by name of the field, are all within the bounds."""
        return all((cost := costs[name]) is not None and cost <= bound for name, bound in self.bounds.items())
