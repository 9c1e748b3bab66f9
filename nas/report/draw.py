"""Draws figure data with matplotlib, which only this module imports, and writes the Pareto plot of a run."""

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib

from costmodel.errors import UserError
from costmodel.protocols.published import published_rows
from nas.report.front_figures import BarPanel, FrontFigure, Group, LinePanel, Mark, PanelFigure, front_figure
from nas.run.run import Run

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

plt.rcParams["text.parse_math"] = False  # a dollar in a name begins no formula

TITLE_WIDTH = 170  # characters per line
ERRORS = "± two standard errors over seeds and files"
LABELLED = 12  # front members named in the legend; the rest are in pareto.csv
# Source: Okabe and Ito 2008, https://jfly.uni-koeln.de/color/: colours that colour-blind people can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
FLOOR_COLOUR = "0.35"
LINES = ("-", "--", "-.", ":")
MOST_MARKED = 40  # a series with more points is drawn as a line without markers


def plot_run(run: Run) -> tuple[Path, ...]:
    """Draw a run's Pareto plot; return its files. Raises UserError if no trial completed, OSError if writing fails."""
    if not run.completed:
        raise UserError(f"{run.folder} has no completed trial yet, so there is nothing to plot.")
    return save_figure(run.folder / "plots" / "pareto", draw_front(front_figure(run, published_rows())))


def save_figure(path: Path, figure: Figure) -> tuple[Path, ...]:
    """Write a figure as PNG and SVG, close it, and return the two files. path: their path without suffix."""
    path.parent.mkdir(exist_ok=True)
    paths = tuple(path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg"))
    for written in paths:
        figure.savefig(written)
        figure.set_layout_engine("none")  # the first file has fixed the layout
    plt.close(figure)
    return paths


def svg_text(figure: Figure) -> str:
    """Return a figure as an SVG element for an HTML page, and close the figure; equal figures give equal text."""
    text = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "a fixed salt, for ids that do not change"}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    plt.close(figure)
    return text.getvalue()[text.getvalue().index("<svg") :]


def draw_front(data: FrontFigure) -> Figure:
    """Return the Pareto plot, 1000 pixels wide, with a legend below the axes."""
    figure = plt.figure(figsize=(10, 7.5), dpi=100, layout="constrained")
    widths = [3, 2] if data.published else [1]  # without rows of the papers there is one column
    grid = figure.add_gridspec(2, len(widths), height_ratios=[1, 11], width_ratios=widths)
    axes = figure.add_subplot(grid[1, 0])
    _draw_run(axes, data)
    strip = figure.add_subplot(grid[0, 0], sharex=axes)  # trials without a final perplexity, at their latency
    strip.plot(data.paused_min, [1] * len(data.paused_min), color="0.5", marker="|", linestyle="")
    strip.plot(data.diverged_min, [0] * len(data.diverged_min), color="tab:red", marker="x", linestyle="")
    strip.set_yticks([0, 1], [f"diverged ({len(data.diverged_min)})", f"low fidelity ({len(data.paused_min)})"])
    strip.set_ylim(-0.6, 1.6)
    strip.tick_params(labelbottom=False, labelsize=8)
    strip.set_title(data.title, fontsize=9, loc="left")
    if data.published:
        papers = figure.add_subplot(grid[:, 1])
        papers.set_title(data.published_title, fontsize=9, loc="left")
        papers.axvline(data.budget_min, color="tab:red", linestyle="--", linewidth=1)
        papers.plot(*_places(data.published), color="tab:green", marker="s", linestyle="")
        _label(papers, data.published)
        papers.margins(x=0.25)
        papers.set_xlabel("printed latency (minutes)")
        papers.set_ylabel("printed perplexity")
        papers.grid(alpha=0.2)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=8)
    return figure


def draw_panels(data: PanelFigure) -> Figure:
    """Return a figure with a grid of panels and one legend below them."""
    columns = min(data.columns, len(data.panels))
    rows = -(-len(data.panels) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(12.6 if columns > 1 else 7.5, 0.8 + data.row_height * rows), dpi=100,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    figure.suptitle(fill(data.title, TITLE_WIDTH), fontsize=9)
    names = dict.fromkeys(series[0] for panel in data.panels for series in panel.series)
    places = {name: place for place, name in enumerate(names)}
    legend: dict[str, Any] = {}
    for axes, panel in zip(grid.flat, data.panels, strict=False):
        axes.set_title(panel.title, fontsize=9, loc="left")
        axes.set_xlabel(panel.x_label, fontsize=8)
        axes.tick_params(labelsize=7)
        if isinstance(panel, BarPanel):
            lefts = [0.0] * len(panel.groups)
            for name, values in panel.series:
                colour, hatch = COLOURS[places[name] % len(COLOURS)], "//" * (places[name] // len(COLOURS))
                bars: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white"}
                axes.barh(range(len(panel.groups)), values, left=lefts, label=name, **bars)
                lefts = [left + value for left, value in zip(lefts, values, strict=True)]
            axes.set_yticks(range(len(panel.groups)), panel.groups, fontsize=7)
            axes.set_ylim(len(panel.groups) - 0.5, -0.5)
            axes.margins(x=0.0)
        else:
            _draw_lines(axes, panel, places)
        legend |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    for axes in grid.flat[len(data.panels) :]:
        axes.axis("off")
    if len(legend) > 1:
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _draw_lines(axes: Axes, panel: LinePanel, places: Mapping[str, int]) -> None:
    for series in panel.series:
        place = places[series.name]
        style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "markersize": 4}
        style["marker"] = "osD^v"[place % 5] if len(series.x) <= MOST_MARKED else ""
        style["linestyle"] = LINES[place // len(COLOURS) % len(LINES)]
        axes.plot(series.x, series.y, label=series.name, linewidth=1, **style)
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(matplotlib.ticker.LogFormatter(minor_thresholds=(2, 1)))
    axes.set_ylabel(panel.y_label, fontsize=8)
    axes.grid(alpha=0.2)


def _draw_run(axes: Axes, data: FrontFigure) -> None:
    _draw_group(axes, data.dominated, color="0.6", marker="o", label="dominated")
    _draw_group(axes, data.baselines, color="tab:brown", marker="D", label="baseline, for comparison only")
    axes.step(*_places(data.front), where="post", color="tab:blue", linewidth=1)
    names = [f"{number}  {mark.name}" for number, mark in enumerate(data.front[:LABELLED], 1)]
    others = ["others in pareto.csv"] if len(data.front) > LABELLED else []
    label = "\n".join(["Pareto front", *names, *others])
    _draw_group(axes, data.front, color="tab:blue", marker="o", label=label)
    marks = (*data.front, *data.dominated, *data.baselines)
    if any(mark.spread is not None for mark in marks):
        axes.plot([], [], color="0.3", marker="|", markersize=9, linestyle="", label=f"mean, {ERRORS}")
    if any(mark.spread is None for mark in marks):
        hollow: dict[str, Any] = {"color": "0.3", "marker": "o", "markersize": 5, "markerfacecolor": "white"}
        axes.plot([], [], **hollow, linestyle="", label="one seed, no error known")
    if data.parent is not None:
        style: dict[str, Any] = {"color": "tab:green", "marker": "*", "markersize": 9, "linestyle": ""}
        name = f"parent {data.parent.notation}, unmodified"
        axes.plot([data.parent.latency_s / 60], [data.parent.perplexity], **style, label=name)
    axes.axvline(data.budget_min, color="tab:red", linestyle="--", linewidth=1, label=data.budget)
    for number, (name, perplexity) in enumerate(data.ngrams.items()):
        label = "_" if number else data.ngrams_title
        axes.axhline(perplexity, color=FLOOR_COLOUR, linewidth=0.9, linestyle=":", zorder=1, label=label)
        axes.text(
            0.005, perplexity, f"{name} {perplexity:.3g}", transform=axes.get_yaxis_transform(),
            ha="left", va="bottom", fontsize=7, color=FLOOR_COLOUR,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:.4g}"))
    axes.yaxis.set_minor_formatter(matplotlib.ticker.StrMethodFormatter("{x:.4g}"))
    axes.set_ylabel("validation perplexity (log scale)")
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.set_xlabel(
        "predicted latency per token, folded model (minutes)\n"
        "horizontal bar: over all coefficients consistent with the data"
    )
    axes.grid(alpha=0.2)
    _label(axes, data.baselines)
    _label(axes, tuple(mark._replace(name=str(number)) for number, mark in enumerate(data.front, 1)))


def _draw_group(axes: Axes, group: Group, *, color: str, marker: str, label: str) -> None:
    """Draw filled marks with error bars, and hollow ones where no error is known."""
    style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 5, "linestyle": ""}
    if group:
        axes.plot([], [], **style, label=label)
    bare = [mark for mark in group if mark.spread is None]
    axes.plot(*_places(bare), **style, markerfacecolor="white")
    known = [mark for mark in group if mark.spread is not None]
    errors = [[abs(mark.perplexity - mark.spread[end]) for mark in known if mark.spread] for end in (0, 1)]
    axes.errorbar(*_places(known), yerr=errors, **style, elinewidth=1, capsize=3)
    ranges = [(mark.perplexity, *mark.range_min) for mark in group if mark.range_min is not None]
    if ranges:
        axes.hlines(*zip(*ranges, strict=True), color=color, linewidth=1, alpha=0.5)


def _places(marks: Sequence[Mark]) -> tuple[list[float], list[float]]:
    return [mark.latency_min for mark in marks], [mark.perplexity for mark in marks]


def _label(axes: Axes, group: Group) -> None:
    """Name the members, alternately below and above from the lowest perplexity up, so that neighbours stay legible."""
    for place, mark in enumerate(sorted(group, key=lambda mark: mark.perplexity)):
        va, shift = ("bottom", 5) if place % 2 else ("top", -5)
        point = (mark.latency_min, mark.perplexity)
        axes.annotate(mark.name, point, textcoords="offset points", xytext=(5, shift), va=va, fontsize=7)
