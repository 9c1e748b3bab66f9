"""Shared by benchmarks: ratios of alternating measurements, tables, figures with bounds."""

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
    """A measured figure that must be at most `most`; `form` formats both."""

    name: str
    value: float
    form: str = "{:.2f}"
    most: float = 0.0

    @property
    def cells(self) -> list[str]:
        """Name, value, bound, and PASS or FAIL."""
        bar = f"<= {self.form.format(self.most)}"
        return [self.name, self.form.format(self.value), bar, "PASS" if self.value <= self.most else "FAIL"]


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
