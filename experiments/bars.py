"""Shared by benchmarks: processor seconds, ratios of alternating measurements, and figures with required bounds."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.table import Table

from costmodel.report import tables


class Figure(NamedTuple):
    """A measured figure that must lie between `least` and `most`, if these are given; `form` formats all three."""

    name: str
    value: float
    form: str = "{:.2f}"
    least: float | None = None
    most: float | None = None

    @property
    def verdict(self) -> str:
        """PASS or FAIL, or empty without bounds."""
        if self.least is None and self.most is None:
            return ""
        is_met = (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)
        return "PASS" if is_met else "FAIL"

    @property
    def cells(self) -> list[str]:
        """Name, value, bounds and verdict."""
        bars = ((">=", self.least), ("<=", self.most))
        bar = " ".join(f"{sign} {self.form.format(number)}" for sign, number in bars if number is not None)
        return [self.name, self.form.format(self.value), bar, self.verdict]


def figure_table(title: str, figures: Iterable[Figure]) -> Table:
    """Tabulate figures, one per line."""
    return table(("", "measured", "bar", "verdict"), (figure.cells for figure in figures), title=title)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> Table:
    """Return a table with the first column on the left and all others on the right."""
    return tables.table(columns[:1], columns[1:], rows, title=title)


def cpu_s(work: Callable[[], object]) -> float:
    """Return the processor seconds of a function call, which do not grow with other work of the machine."""
    since_s = time.process_time()
    work()
    return time.process_time() - since_s


def median_ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """Return the median over rounds of the ratio of two measurements that alternate."""
    return statistics.median(numerator / other for numerator, other in zip(above, below, strict=True))
