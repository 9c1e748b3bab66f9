"""Data of plain figures: panels of lines, points, bars and heat maps side by side. No drawing."""

from typing import NamedTuple, TypeAlias


class Series(NamedTuple):
    """Points that belong together. names: of each point, or none. joined: by a line."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    names: tuple[str, ...] = ()
    joined: bool = True


class LinePanel(NamedTuple):
    """Series against one another. log_x: base of a logarithmic axis, 0 for a linear one; log_y: whether that is one."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: int = 0
    log_y: bool = False


class BarPanel(NamedTuple):
    """Horizontal bars. groups: one name a group; series: name and one value a group. stacked: or side by side."""

    title: str
    x_label: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[float, ...]], ...]
    stacked: bool = False


class HeatPanel(NamedTuple):
    """Rows of cells from the top; None is no number and stays blank. limits: of the colours, alike in all panels."""

    title: str
    x_label: str
    y_label: str
    cells: tuple[tuple[float | None, ...], ...]
    limits: tuple[float, float]


Panel: TypeAlias = LinePanel | BarPanel | HeatPanel


class PanelFigure(NamedTuple):
    """Panels under one title, in rows of at most `columns`. colours: what the colours of heat maps mean.

    row_height: inches.
    """

    title: str
    panels: tuple[Panel, ...]
    columns: int = 3
    colours: str = ""
    row_height: float = 3.4
