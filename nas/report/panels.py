"""Data of plain figures: panels of lines and stacked bars. Draws nothing."""

from typing import NamedTuple


class Series(NamedTuple):
    """Points joined by a line."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]


class LinePanel(NamedTuple):
    """Series on common axes. log_y: whether y is logarithmic."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_y: bool = False


class BarPanel(NamedTuple):
    """Horizontal bars, stacked. groups: names. series: name, and one value per group."""

    title: str
    x_label: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[float, ...]], ...]


class PanelFigure(NamedTuple):
    """Panels under one title, in rows of at most `columns`. row_height: inches."""

    title: str
    panels: tuple[LinePanel | BarPanel, ...]
    columns: int = 3
    row_height: float = 3.4
