"""Figure data to matplotlib and to files; its only importer."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from nas.report.cost_figures import BreakdownFigure, SensitivityFigure, Stack
from nas.report.front_figures import FrontFigure, Group, NgramLines, WhatIfFigure, WhatIfPanel
from nas.report.panels import BarPanel, HeatPanel, LinePanel, PanelFigure

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ERRORS = "± two standard errors over seeds and files"
LABELLED = 12  # front members named in the legend; the rest are in pareto.csv
# Okabe and Ito 2008, https://jfly.uni-koeln.de/color/: told apart by the colour-blind
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
OTHER_COLOUR = "0.75"
FLOOR_COLOUR = "0.35"
LINES = ("-", "--", "-.", ":")
NUMBER_SHARE, WORD_SHARE = 0.03, 0.07  # of an axis: the room that the label of a part of a bar needs
CLOSE = 1.5  # ratio of marks below which their names would meet between them


def save_figure(path: Path, figure: Figure) -> tuple[Path, ...]:
    """Writes a figure as PNG and SVG and closes it. path: without its ending."""
    path.parent.mkdir(exist_ok=True)
    paths = tuple(path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg"))
    for written in paths:
        figure.savefig(written)
    plt.close(figure)
    return paths


def draw_front(data: FrontFigure) -> Figure:
    """The Pareto plot, readable at 1000 pixels; its legend is below it, where it covers nothing."""
    figure = plt.figure(figsize=(10, 7.5), dpi=100, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 11], width_ratios=[3, 2])
    axes = figure.add_subplot(grid[1, 0])
    _draw_run(axes, data)
    _draw_ended_early(figure.add_subplot(grid[0, 0], sharex=axes), data)
    _draw_published(figure.add_subplot(grid[:, 1]), data)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=8)
    return figure


def draw_what_if(data: WhatIfFigure) -> Figure:
    """The two fronts side by side, perplexity on one axis."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 5.5), dpi=100, layout="constrained", sharey=True)
    figure.suptitle(data.title, fontsize=9)
    for axes, panel in zip(panels, (data.before, data.after), strict=True):
        _draw_panel(axes, panel)
        _draw_ngrams(axes, data.ngrams)
    _label_perplexity(panels[0])
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def draw_sensitivity(data: SensitivityFigure) -> Figure:
    """Latency against bandwidth and against round-trip time, all axes logarithmic."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.5), dpi=100, layout="constrained", sharey=True)
    figure.suptitle(data.title, fontsize=9)
    bandwidths = [value / 1e6 for value in data.bandwidths]
    for index, curve in enumerate(data.by_bandwidth):
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)]}
        left.plot(bandwidths, curve.latency_s, label=curve.name, **style)
        right.plot([value * 1e3 for value in data.rtts_s], data.by_rtt[index].latency_s, **style)
    left.set_xlabel(f"bandwidth (Mbit/s), at a round-trip time of {data.rtt_s * 1e3:g} ms")
    right.set_xlabel(f"round-trip time (ms), at a bandwidth of {data.bandwidth_bits_per_s / 1e6:g} Mbit/s")
    left.set_ylabel("predicted latency per token (seconds)")
    left.set_yscale("log")
    left.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
    left.yaxis.set_minor_formatter(matplotlib.ticker.LogFormatter(minor_thresholds=(2, 1)))
    for axes, marks in (
        (left, [(name, bandwidth / 1e6) for name, bandwidth, _ in data.presets]),
        (right, [(name, rtt_s * 1e3) for name, _, rtt_s in data.presets]),
    ):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
        axes.grid(alpha=0.2)
        _mark_presets(axes, marks)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def draw_breakdown(data: BreakdownFigure) -> Figure:
    """Four stacks of horizontal bars, one bar an architecture: latency above bytes, kinds of op beside layers."""
    figure, grid = plt.subplots(2, 2, figsize=(12, 3 + 0.8 * len(data.names)), dpi=100, layout="constrained")
    figure.suptitle(data.title, fontsize=9)
    kinds = list(dict.fromkeys((*data.latency_by_kind.parts, *data.bytes_by_kind.parts)))
    named = [kind for kind in kinds if kind != "other"]
    colours = {kind: COLOURS[index % len(COLOURS)] for index, kind in enumerate(named)} | {"other": OTHER_COLOUR}
    hatches = {kind: "//" * (index // len(COLOURS)) for index, kind in enumerate(named)}
    seconds = (
        ("minutes", 60.0) if max(map(sum, zip(*data.latency_by_kind.values, strict=True))) >= 120 else ("seconds", 1.0)
    )
    for row, stacks, unit in (
        (grid[0], (data.latency_by_kind, data.latency_by_layer), seconds),
        (grid[1], (data.bytes_by_kind, data.bytes_by_layer), ("GB", 1e9)),
    ):
        _draw_stack(row[0], data.names, stacks[0], unit, colours, hatches)
        _draw_stack(row[1], data.names, stacks[1], unit, _layer_colours(stacks[1].parts), {})
        row[1].tick_params(labelleft=False)
    handles = [matplotlib.patches.Patch(facecolor=colours[kind], hatch=hatches.get(kind), label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, fontsize=8)
    return figure


def draw_panels(data: PanelFigure) -> Figure:
    """A grid of panels; what its lines and bars are is said once, below it."""
    columns = min(data.columns, len(data.panels))
    rows = -(-len(data.panels) // columns)
    size = (12.6 if columns > 1 else 7.5, 0.8 + 3.4 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, dpi=100, layout="constrained", squeeze=False)
    figure.suptitle(data.title, fontsize=9)
    legend: dict[str, Any] = {}
    image: Any = None
    for axes, panel in zip(grid.flat, data.panels, strict=False):
        axes.set_title(panel.title, fontsize=9, loc="left")
        axes.set_xlabel(panel.x_label, fontsize=8)
        axes.tick_params(labelsize=7)
        if isinstance(panel, HeatPanel):
            image = _draw_heat(axes, panel)
            continue
        _draw_bars(axes, panel) if isinstance(panel, BarPanel) else _draw_lines(axes, panel)
        handles, names = axes.get_legend_handles_labels()
        legend |= dict(zip(names, handles, strict=True))
    for axes in grid.flat[len(data.panels) :]:
        axes.axis("off")
    if image is not None:
        figure.colorbar(image, ax=grid, shrink=0.8).set_label(data.colours, fontsize=8)
    if len(legend) > 1:
        figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _draw_lines(axes: Axes, panel: LinePanel) -> None:
    for index, series in enumerate(panel.series):
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": "osD^v"[index % 5], "markersize": 4}
        style["linestyle"] = LINES[index // len(COLOURS) % len(LINES)] if series.joined else ""
        axes.plot(series.x, series.y, label=series.name, linewidth=1, **style)
        for place, (x, y, name) in enumerate(zip(series.x, series.y, series.names, strict=False)):
            below = place % 2
            axes.annotate(
                name, (x, y), textcoords="offset points", xytext=(4, -4 if below else 4),
                va="top" if below else "bottom", fontsize=6, color=style["color"],
            )  # fmt: skip
        if series.names:
            axes.margins(x=0.3, y=0.08)  # for the names
    if panel.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
    if panel.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
    axes.set_ylabel(panel.y_label, fontsize=8)
    axes.grid(alpha=0.2)


def _draw_bars(axes: Axes, panel: BarPanel) -> None:
    """The first group on top."""
    height = 0.8 if panel.stacked else 0.8 / len(panel.series)
    lefts = [0.0] * len(panel.groups)
    for index, (name, values) in enumerate(panel.series):
        shift = 0.0 if panel.stacked else (index - (len(panel.series) - 1) / 2) * height
        places = [place + shift for place in range(len(panel.groups))]
        bars = axes.barh(places, values, height, left=lefts, color=COLOURS[index % len(COLOURS)], label=name)
        if panel.stacked:
            lefts = [left + value for left, value in zip(lefts, values, strict=True)]
        else:
            axes.bar_label(bars, fmt="%.3g", fontsize=6, padding=1)
    axes.set_yticks(range(len(panel.groups)), panel.groups, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.1 if not panel.stacked else 0.0)


def _draw_heat(axes: Axes, panel: HeatPanel) -> Any:
    cells = [[math.nan if cell is None else cell for cell in row] for row in panel.cells]
    axes.set_ylabel(panel.y_label, fontsize=8)
    return axes.imshow(cells, cmap="viridis", vmin=panel.limits[0], vmax=panel.limits[1], aspect="auto")


def _layer_colours(parts: Sequence[str]) -> dict[str, tuple[float, ...] | str]:
    """Light to dark from the first layer to the last; the ends in colours of their own."""
    layers = [part for part in parts if part.isdigit()]
    shades = plt.get_cmap("viridis_r")
    colours: dict[str, tuple[float, ...] | str] = {
        part: shades(0.1 + 0.8 * index / max(1, len(layers) - 1)) for index, part in enumerate(layers)
    }
    return colours | {"embed": COLOURS[1], "head": COLOURS[3]}


def _draw_stack(
    axes: Axes,
    names: Sequence[str],
    stack: Stack,
    unit: tuple[str, float],
    colours: dict[str, str] | dict[str, tuple[float, ...] | str],
    hatches: dict[str, str],
) -> None:
    """A bar an architecture; a part is named inside its bars where there is room."""
    totals = [sum(values) for values in zip(*stack.values, strict=True)]
    lefts = [0.0] * len(names)
    for part, values in zip(stack.parts, stack.values, strict=True):
        widths = [value / unit[1] for value in values]
        bars = axes.barh(
            range(len(names)), widths, left=lefts, color=colours[part], hatch=hatches.get(part),
            edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        if part in ("embed", "head") or part.isdigit():
            least = (NUMBER_SHARE if part.isdigit() else WORD_SHARE) * max(totals)
            texts = [part if value > least else "" for value in values]
            dark = part.isdigit() and 2 * int(part) >= len(stack.parts) - 2
            axes.bar_label(bars, texts, label_type="center", fontsize=7, color="white" if dark else "black")
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.set_xlim(0, 1.04 * max(totals) / unit[1])
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(unit[0])
    axes.set_title(stack.title, fontsize=9, loc="left")


def _mark_presets(axes: Axes, marks: Iterable[tuple[str, float]]) -> None:
    """A thin line and a name at each preset that is within the axis."""
    low, high = axes.get_xlim()
    at: dict[float, list[str]] = {}
    for name, value in marks:
        if low < value < high:
            at.setdefault(value, []).append(name)
    before = -math.inf
    for value, names in sorted(at.items()):
        axes.axvline(value, color="0.6", linewidth=0.8, linestyle=":")
        axes.text(
            value, 0.99, ", ".join(names), transform=axes.get_xaxis_transform(), rotation=90, va="top",
            ha="left" if value < CLOSE * before else "right", fontsize=7, color="0.35",
        )  # fmt: skip
        before = value


def _draw_panel(axes: Axes, panel: WhatIfPanel) -> None:
    axes.set_title(panel.title, fontsize=9, loc="left")
    _draw_group(axes, panel.others, color="0.7", marker="o", label="on neither front")
    axes.step(panel.front_min, panel.front_perplexity, where="post", color=COLOURS[0], linewidth=1)
    for group, colour, marker, label in (
        (panel.kept, COLOURS[0], "o", "on both fronts"),
        (panel.gone, COLOURS[5], "X", "on the first front alone"),
        (panel.new, COLOURS[2], "^", "on the second front alone"),
    ):
        axes.plot([], [], color=colour, marker=marker, linestyle="", label=label)
        _draw_group(axes, group, color=colour, marker=marker, label="_")
        _label(axes, group)
    if panel.budget_min is not None:
        axes.axvline(panel.budget_min, color="k", linestyle="--", linewidth=1)
        axes.text(panel.budget_min, 0.01, " budget", transform=axes.get_xaxis_transform(), fontsize=7)
    axes.set_xlabel("predicted latency per token (minutes); numbers as in the table")
    axes.set_yscale("log")
    axes.grid(alpha=0.2)


def _label_perplexity(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:.4g}"))
    axes.yaxis.set_minor_formatter(matplotlib.ticker.StrMethodFormatter("{x:.4g}"))
    axes.set_ylabel("validation perplexity (log scale)")
    axes.tick_params(axis="y", which="both", labelsize=8)


def _draw_run(axes: Axes, data: FrontFigure) -> None:
    _draw_group(axes, data.dominated, color="0.6", marker="o", label="dominated")
    _draw_group(axes, data.baselines, color="tab:brown", marker="D", label="baseline, for comparison only")
    axes.step(data.front.latency_min, data.front.perplexity, where="post", color="tab:blue", linewidth=1)
    names = [f"{number}  {name}" for number, name in enumerate(data.front.names[:LABELLED], 1)]
    others = ["others in pareto.csv"] if len(data.front.names) > LABELLED else []
    label = "\n".join(["Pareto front", *names, *others])
    _draw_group(axes, data.front, color="tab:blue", marker="o", label=label)
    _explain_seeds(axes, (data.front, data.dominated, data.baselines))
    if data.parent is not None:
        style: dict[str, Any] = {"color": "tab:green", "marker": "*", "markersize": 9, "linestyle": ""}
        name = f"parent {data.parent.notation}, as it was given"
        axes.plot([data.parent.latency_s / 60], [data.parent.perplexity], **style, label=name)
    axes.axvline(data.budget_min, color="tab:red", linestyle="--", linewidth=1, label=data.budget)
    _draw_ngrams(axes, data.ngrams)
    axes.set_yscale("log")
    _label_perplexity(axes)
    axes.set_xlabel(
        "predicted latency per token, as deployed (minutes)\n"
        "horizontal bar: over all coefficients consistent with the data"
    )
    axes.grid(alpha=0.2)
    _label(axes, data.baselines)
    _label(axes, data.front._replace(names=tuple(map(str, range(1, len(data.front.names) + 1)))))


def _draw_ngrams(axes: Axes, ngrams: NgramLines) -> None:
    """A thin line at each perplexity, named above its left end, where there are fewest trials."""
    for name, perplexity in zip(ngrams.names, ngrams.perplexity, strict=True):
        label = ngrams.title if name == ngrams.names[0] else "_"
        axes.axhline(perplexity, color=FLOOR_COLOUR, linewidth=0.9, linestyle=":", zorder=1, label=label)
        axes.text(
            0.005, perplexity, f"{name} {perplexity:.3g}", transform=axes.get_yaxis_transform(),
            ha="left", va="bottom", fontsize=7, color=FLOOR_COLOUR,
        )  # fmt: skip


def _draw_group(axes: Axes, group: Group, *, color: str, marker: str, label: str) -> None:
    """Full marks with error bars, hollow ones where no error is known."""
    if not group.names:
        return
    style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 5, "linestyle": ""}
    axes.plot([], [], **style, label=label)
    points = list(zip(group.latency_min, group.perplexity, group.spread, group.range_min, strict=True))
    repeated = [(latency, middle, spread) for latency, middle, spread, _ in points if spread is not None]
    single = [(latency, middle) for latency, middle, spread, _ in points if spread is None]
    if single:
        axes.plot(*zip(*single, strict=True), **style, markerfacecolor="white")
    if repeated:
        latencies, middles, _ = zip(*repeated, strict=True)
        axes.plot(latencies, middles, **style)
        below = [middle - spread[0] for _, middle, spread in repeated]
        above = [spread[1] - middle for _, middle, spread in repeated]
        axes.errorbar(latencies, middles, yerr=[below, above], color=color, linestyle="", elinewidth=1, capsize=3)
    ranges = [(middle, *bounds) for _, middle, _, bounds in points if bounds is not None]
    if ranges:
        axes.hlines(*zip(*ranges, strict=True), color=color, linewidth=1, alpha=0.5)


def _explain_seeds(axes: Axes, groups: Iterable[Group]) -> None:
    """Explains full and hollow marks, those that there are."""
    spreads = [spread for group in groups for spread in group.spread]
    if any(spread is not None for spread in spreads):
        axes.plot([], [], color="0.3", marker="|", markersize=9, linestyle="", label=f"mean, {ERRORS}")
    if None in spreads:
        style: dict[str, Any] = {"color": "0.3", "marker": "o", "markersize": 5, "linestyle": ""}
        axes.plot([], [], **style, markerfacecolor="white", label="one seed, no error known")


def _label(axes: Axes, group: Group) -> None:
    """Names the members, from the lowest perplexity up in turn below and above, so that neighbours stay legible."""
    order = sorted(range(len(group.names)), key=lambda index: group.perplexity[index])
    for place, index in enumerate(order):
        axes.annotate(
            group.names[index],
            (group.latency_min[index], group.perplexity[index]),
            textcoords="offset points",
            xytext=(5, 5) if place % 2 else (5, -5),
            va="bottom" if place % 2 else "top",
            fontsize=7,
        )


def _draw_ended_early(axes: Axes, data: FrontFigure) -> None:
    """A strip above the plot: trials without a perplexity of full fidelity, at their price."""
    axes.plot(data.paused_min, [1] * len(data.paused_min), color="0.5", marker="|", linestyle="")
    axes.plot(data.diverged_min, [0] * len(data.diverged_min), color="tab:red", marker="x", linestyle="")
    axes.set_yticks([0, 1], [f"diverged ({len(data.diverged_min)})", f"looked at ({len(data.paused_min)})"])
    axes.set_ylim(-0.6, 1.6)
    axes.tick_params(labelbottom=False, labelsize=8)
    axes.set_title(data.title, fontsize=9, loc="left")


def _draw_published(axes: Axes, data: FrontFigure) -> None:
    axes.set_title(data.published_title, fontsize=9, loc="left")
    axes.axvline(data.budget_min, color="tab:red", linestyle="--", linewidth=1)
    if not data.published.names:
        axes.text(0.5, 0.5, "no published row", transform=axes.transAxes, ha="center", fontsize=9)
        return
    axes.plot(data.published.latency_min, data.published.perplexity, color="tab:green", marker="s", linestyle="")
    _label(axes, data.published)
    axes.margins(x=0.25)
    axes.set_xlabel("printed latency (minutes)")
    axes.set_ylabel("printed perplexity")
    axes.grid(alpha=0.2)
