"""Data of plain figures: panels of lines, points, bars and heat maps. Draws nothing."""

from typing import NamedTuple, TypeAlias


class Series(NamedTuple):
    """Points of one style. names: of each point, or none. joined: whether a line connects them."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    names: tuple[str, ...] = ()
    joined: bool = True


class LinePanel(NamedTuple):
    """Series on common axes. log_x: base of a logarithmic axis, 0 for a linear one. log_y: whether y is logarithmic."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: int = 0
    log_y: bool = False


class BarPanel(NamedTuple):
    """Horizontal bars. groups: names. series: name, and one value per group. stacked: else side by side."""

    title: str
    x_label: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[float, ...]], ...]
    stacked: bool = False


class HeatPanel(NamedTuple):
    """Rows of cells from the top; None stays blank. limits: of the colours, equal in all panels."""

    title: str
    x_label: str
    y_label: str
    cells: tuple[tuple[float | None, ...], ...]
    limits: tuple[float, float]


Panel: TypeAlias = LinePanel | BarPanel | HeatPanel


class PanelFigure(NamedTuple):
    """Panels under one title, in rows of at most `columns`. colours: meaning of the colours of heat maps.

    row_height: inches.
    """

    title: str
    panels: tuple[Panel, ...]
    columns: int = 3
    colours: str = ""
    row_height: float = 3.4
