"""Makes all tables in one form: names on the left, numbers on the right, no lines."""

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table


def table(
    left: Sequence[str],
    right: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    footers: Mapping[str, str] | None = None,
    title: str | None = None,
) -> Table:
    """Return a table with columns of names, which do not wrap, then columns of numbers; `footers` are by column."""
    shown = Table(box=None, pad_edge=False, show_footer=footers is not None, title=title, title_justify="left")
    shown.title_style = ""
    for name in left:
        shown.add_column(name, no_wrap=True, footer=(footers or {}).get(name, ""))
    for name in right:
        shown.add_column(name, justify="right", footer=(footers or {}).get(name, ""))
    for row in rows:
        shown.add_row(*row)
    return shown
