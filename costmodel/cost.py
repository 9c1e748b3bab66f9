"""The definition of a cost, with the units that every protocol, testbed and report uses.

- round: one wait of a party for a message, on the program's critical path.
- message: one send operation of a party.
- sent_bytes: bytes on the wire, online and offline, summed over the computing parties; under `crypten` also the bytes
  of its dealer.

Costs are in seconds and bytes; minutes and GB (1e9 bytes) exist only in parsing and printing. None means not known,
never zero: a sum with an unknown part is unknown.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from costmodel.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """The cost of one op, a layer or a whole model; a field is None if it is not known.

    Attributes:
        latency_s: Seconds (of a whole model from prompt to token): `compute_s` + `network_s` if these are known.
        sent_bytes: Bytes on the wire: `online_bytes` + `setup_bytes` (offline) if these are known.
        key_bytes: Bytes of keys that a dealer sends each party before the run; no other field includes them. None if
            the protocol has no keys.
        rounds, messages: Number of waits on the critical path, and of sends; a mean over tokens may be fractional.
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
    """Return the sum of costs, field by field; a field that is None in any of them is None.

    A UserError is raised if there is nothing to sum.
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
    """Return a cost divided by `num_shares`, field by field; None stays None."""
    if num_shares == 1:
        return price
    values: dict[str, Any] = {field.name: getattr(price, field.name) for field in fields(Price)}
    shares: dict[str, Any] = {name: None if value is None else value / num_shares for name, value in values.items()}
    return Price(**shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """The parts of a `Price` that a budget can bound."""

    latency_s: float
    sent_bytes: float
    key_bytes: float | None = None

    @classmethod
    def of(cls, price: Price) -> "Costs":
        return cls(latency_s=price.latency_s, sent_bytes=price.sent_bytes, key_bytes=price.key_bytes)


_MEASURES = tuple(field.name for field in fields(Costs))


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Upper bounds on costs, in seconds and bytes; None is no bound. A cost that is not known exceeds every bound.

    also: pairs of another protocol's name and the budget under it. A UserError is raised if a bound is not positive and
    finite.
    """

    latency_s: float | None = None
    sent_bytes: float | None = None
    key_bytes: float | None = None
    also: tuple[tuple[str, "Budget"], ...] = ()

    def __post_init__(self) -> None:
        for name, bound in self.bounds.items():
            if not 0 < bound < float("inf"):
                raise UserError(f"budget `{name}` must be positive and finite, but got {bound}.")

    def check_keys(self, protocol: str, *, has_keys: bool) -> None:
        """Raise a UserError that names the flag --budget-keys if keys are bounded but the protocol has no keys."""
        if self.key_bytes is not None and not has_keys:
            raise UserError(f"--budget-keys is of a dealer's keys, but protocol {protocol} has none; leave it out.")

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are not None, by field name, without those under other protocols."""
        return {name: bound for name in _MEASURES if (bound := getattr(self, name)) is not None}

    def admits(self, costs: Costs | Price, also: Mapping[str, Costs] | None = None) -> bool:
        """Whether each bounded cost is known and at most its bound. also: costs under other protocols, by protocol."""
        known = also or {}
        return all(
            (cost := getattr(costs, name)) is not None and cost <= bound for name, bound in self.bounds.items()
        ) and all(name in known and budget.admits(known[name]) for name, budget in self.also)
