"""What benchmarks share: seconds, ratios of ways that take turns, and figures beside the bars that they must meet."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.table import Table

from costmodel.report import tables


class Figure(NamedTuple):
    """A measured figure. form: of it and its bar, as `str.format` takes it. least, most: its bar, if there is one."""

    name: str
    value: float
    form: str = "{:.2f}"
    least: float | None = None
    most: float | None = None

    @property
    def verdict(self) -> str:
        """PASS or FAIL, nothing without a bar."""
        if self.least is None and self.most is None:
            return ""
        is_met = (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)
        return "PASS" if is_met else "FAIL"

    @property
    def cells(self) -> list[str]:
        """Name, value, bar and verdict."""
        bars = ((">=", self.least), ("<=", self.most))
        bar = " ".join(f"{sign} {self.form.format(number)}" for sign, number in bars if number is not None)
        return [self.name, self.form.format(self.value), bar, self.verdict]


def figure_table(title: str, figures: Iterable[Figure]) -> Table:
    """A line a figure."""
    return table(("", "measured", "bar", "verdict"), (figure.cells for figure in figures), title=title)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> Table:
    """The first column to the left, all others to the right."""
    return tables.table(columns[:1], columns[1:], rows, title=title)


def cpu_s(work: Callable[[], object]) -> float:
    """Processor seconds of this process, which do not grow with what else the machine does."""
    since_s = time.process_time()
    work()
    return time.process_time() - since_s


def median_ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """The median over rounds, in which two ways take turns, of one figure over the other."""
    return statistics.median(numerator / other for numerator, other in zip(above, below, strict=True))
