"""Console output of the commands: lines are not wrapped, and markup is printed as it is."""

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from costmodel.config.console import Console


def table(
    left: Sequence[str],
    right: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    footers: Mapping[str, str] | None = None,
    title: str | None = None,
) -> Table:
    """Return a table. left, right: titles of its left-aligned, then its right-aligned columns; footers: by title."""
    shown = Table(box=None, pad_edge=False, show_footer=footers is not None, title=title, title_justify="left")
    shown.title_style = ""
    for name in left:
        shown.add_column(name, no_wrap=True, footer=(footers or {}).get(name, ""))
    for name in right:
        shown.add_column(name, justify="right", footer=(footers or {}).get(name, ""))
    for row in rows:
        shown.add_row(*row)
    return shown


PIPE_WIDTH = 160  # characters in a line of a table that is not printed to a terminal


def print_blocks(lines: Iterable[str], tables: Iterable[Table]) -> None:
    """Print lines, then tables, each table after an empty line."""
    to = console()
    for line in lines:
        to.print(line)
    for table in tables:
        to.print()
        to.print(table)


def print_csv(records: Sequence[Mapping[str, Any]]) -> None:
    """Print records, all with the same keys, as CSV; a mapping in a record is written as `name=value name=value`."""
    if not records:
        return
    writer = csv.DictWriter(sys.stdout, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    for record in records:
        shapes = {key: value for key, value in record.items() if isinstance(value, Mapping)}
        words = {key: " ".join(f"{name}={part}" for name, part in shape.items()) for key, shape in shapes.items()}
        writer.writerow({**record, **words})


def console(*, stderr: bool = False) -> Console:
    shown = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, stderr=stderr)
    if not shown.is_terminal:
        shown.width = PIPE_WIDTH
    return shown
