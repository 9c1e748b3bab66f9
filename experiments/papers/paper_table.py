"""A table in four forms: Markdown, CSV with every digit, LaTeX, and the terminal."""

import csv
import io
import math
from pathlib import Path
from typing import NamedTuple, TypeAlias

from nas.storage import replace_file

Cell: TypeAlias = str | int | float | None

_LATEX = str.maketrans({character: f"\\{character}" for character in "%_&#$"})


class Column(NamedTuple):
    """A column, with the `format` specification of its numbers, except in CSV."""

    heading: str
    form: str = "g"

    def text(self, cell: Cell) -> str:
        """Return a cell as text: `-` for None, `diverged` for an infinite perplexity."""
        if cell is None or (isinstance(cell, float) and math.isnan(cell)):
            return "-"
        if isinstance(cell, float) and math.isinf(cell):
            return "diverged"
        return cell if isinstance(cell, str) else format(cell, self.form)


class PaperTable(NamedTuple):
    """A table with its notes; `name` is the name of its files without suffix."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def texts(self) -> list[list[str]]:
        return [[column.text(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows]


def markdown(table: PaperTable) -> str:
    """Return the table in Markdown, with the notes as a list below it."""
    headings = [column.heading for column in table.columns]
    rule = ["---", *["---:"] * (len(headings) - 1)]
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *table.texts)]
    return "\n".join([f"**{table.title}**", "", *lines, "", *(f"- {note}" for note in table.notes)]).rstrip() + "\n"


def csv_text(table: PaperTable) -> str:
    """Return the table as CSV, with every digit and without notes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(column.heading for column in table.columns)
    writer.writerows(["" if cell is None else cell for cell in row] for row in table.rows)
    return text.getvalue()


def latex(table: PaperTable) -> str:
    """Return a floating LaTeX table that needs no package."""
    lines = [" & ".join(cell.translate(_LATEX) for cell in cells) + r" \\" for cells in table.texts]
    headings = " & ".join(column.heading.translate(_LATEX) for column in table.columns)
    caption = " ".join([f"{table.title}.", *(f"{note[0].upper()}{note[1:]}." for note in table.notes)])
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{caption.translate(_LATEX)}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
            r"\hline",
            headings + r" \\",
            r"\hline",
            *lines,
            r"\hline",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def write_table(folder: Path, table: PaperTable) -> tuple[Path, ...]:
    """Write the three files and return their paths."""
    forms = {"md": markdown(table), "csv": csv_text(table), "tex": latex(table)}
    paths = {folder / f"{table.name}.{ending}": text for ending, text in forms.items()}
    for path, text in paths.items():
        replace_file(path, text)
    return tuple(paths)
