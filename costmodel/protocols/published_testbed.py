"""A testbed file: fitted coefficients, where each comes from, and the measurements that they must reproduce."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from costmodel.config.schema import decode
from costmodel.config.strict_yaml import load_mapping
from costmodel.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """One coefficient.

    value: seconds or bytes per unit of its term, at least 0.
    identified_by: `data` if the rows determine it, `prior` if they cannot and another source does.
    low, high: bounds that a prior sets; None if the rows alone bound it.
    source: where the value comes from.

    Raises UserError unless 0 <= low <= value <= high, with bounds exactly where a prior identifies the value.
    """

    value: float
    identified_by: Literal["data", "prior"]
    source: str
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.value < math.inf:
            raise UserError(f"`value` must be finite and at least 0, but got {self.value}.")
        if (self.identified_by == "prior") != (self.low is not None) or (self.low is None) != (self.high is None):
            raise UserError("a constant needs `low` and `high` if a prior identifies it, and neither if data do.")
        if self.low is not None and self.high is not None and not 0 <= self.low <= self.value <= self.high:
            raise UserError(
                f"`value` must lie between `low` and `high`, but got {self.low}, {self.value}, {self.high}."
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """The values that are allowed, before any row is looked at."""
        return (self.low or 0.0, math.inf if self.high is None else self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedRow:
    """A measurement: its latency in seconds, and how many of each term its op graph has."""

    name: str
    latency_s: float
    counts: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Testbed:
    """Coefficients per term, in seconds and bytes.

    not_identified: what the measurements cannot tell, in words.
    latency_tolerance: greatest relative error on a row of coefficients that count as consistent with the rows.
    """

    __test__ = False  # not a test class, whatever pytest makes of the name

    not_identified: tuple[str, ...]
    sent_bytes: dict[str, Constant]
    latency_s: dict[str, Constant]
    latency_tolerance: float
    rows: tuple[FittedRow, ...]


def load_testbed(path: Path) -> Testbed:
    """The testbed in a YAML file. Raises UserError, naming the file."""
    return decode(Testbed, load_mapping(path), str(path))
