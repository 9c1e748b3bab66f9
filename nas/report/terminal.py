"""Where the tables of commands go: the terminal, or a pipe that is as wide as they need."""

import sys

from rich.console import Console

PIPE_WIDTH = 160  # columns of a table that no terminal limits


def table_console() -> Console:
    """Standard output; lines are not broken, tables are as wide as the terminal."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)
