"""Where the commands print: a console that wraps nothing, also where no terminal limits it."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 140  # columns of a table that no terminal limits


def print_blocks(lines: Iterable[str], tables: Iterable[Table]) -> None:
    """Lines, then tables, each after an empty line."""
    to = console()
    for line in lines:
        to.print(line)
    for table in tables:
        to.print()
        to.print(table)


def console() -> Console:
    usual = Console(highlight=False, soft_wrap=True)
    return usual if usual.is_terminal else Console(highlight=False, soft_wrap=True, width=PIPE_WIDTH)
