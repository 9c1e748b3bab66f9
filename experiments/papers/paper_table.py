"""A table in the forms that readers want: Markdown, CSV with every digit, LaTeX, and the terminal."""

import csv
import io
import math
from pathlib import Path
from typing import NamedTuple, TypeAlias

from nas.storage import replace_file

Cell: TypeAlias = str | int | float | None

_LATEX = str.maketrans({character: f"\\{character}" for character in "%_&#$"})


class Column(NamedTuple):
    """form: of numbers, as `format` takes it; CSV has them as they are."""

    heading: str
    form: str = "g"

    def text(self, cell: Cell) -> str:
        """A cell as it is read: `-` for none, `diverged` for an infinite perplexity."""
        if cell is None or (isinstance(cell, float) and math.isnan(cell)):
            return "-"
        if isinstance(cell, float) and math.isinf(cell):
            return "diverged"
        return cell if isinstance(cell, str) else format(cell, self.form)


class PaperTable(NamedTuple):
    """name: of its files, without ending. notes: what must be read with it."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def texts(self) -> list[list[str]]:
        return [[column.text(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows]


def markdown(table: PaperTable) -> str:
    """Notes are a list under the table."""
    headings = [column.heading for column in table.columns]
    rule = ["---", *["---:"] * (len(headings) - 1)]
    lines = ["| " + " | ".join(cells) + " |" for cells in (headings, rule, *table.texts)]
    return "\n".join([f"**{table.title}**", "", *lines, "", *(f"- {note}" for note in table.notes)]).rstrip() + "\n"


def csv_text(table: PaperTable) -> str:
    """Numbers with every digit; no notes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(column.heading for column in table.columns)
    writer.writerows(["" if cell is None else cell for cell in row] for row in table.rows)
    return text.getvalue()


def latex(table: PaperTable) -> str:
    """A floating table that needs no package."""
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
    """Writes the three files and returns their paths."""
    forms = {"md": markdown(table), "csv": csv_text(table), "tex": latex(table)}
    paths = {folder / f"{table.name}.{ending}": text for ending, text in forms.items()}
    for path, text in paths.items():
        replace_file(path, text)
    return tuple(paths)
