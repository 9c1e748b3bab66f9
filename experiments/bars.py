"""Shared by benchmarks: ratios of alternating measurements, tables, figures with required bounds."""

import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from costmodel.report import tables
from nas.storage import replace_file


class Figure(NamedTuple):
    """A measured figure that must lie between `least` and `most`, if these are given; `form` formats all three."""

    name: str
    value: float
    form: str = "{:.2f}"
    least: float | None = None
    most: float | None = None

    @property
    def cells(self) -> list[str]:
        """Name, value and bounds, and PASS or FAIL if there are bounds."""
        bars = ((">=", self.least), ("<=", self.most))
        bar = " ".join(f"{sign} {self.form.format(number)}" for sign, number in bars if number is not None)
        is_met = (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)
        return [self.name, self.form.format(self.value), bar, ("PASS" if is_met else "FAIL") if bar else ""]


def figure_table(title: str, figures: Iterable[Figure]) -> Table:
    """Tabulate figures, one per line."""
    return table(("", "measured", "bar", "verdict"), (figure.cells for figure in figures), title=title)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str | None = None) -> Table:
    """Return a table with the first column on the left and all others on the right."""
    return tables.table(columns[:1], columns[1:], rows, title=title)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> None:
    """Replace a file by a table as text. Raises OSError."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    replace_file(path, text.getvalue())


def median_ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """Return the median over rounds of the ratio of two measurements that alternate."""
    return statistics.median(numerator / other for numerator, other in zip(above, below, strict=True))
