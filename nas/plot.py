"""Pareto plots of a run: `python -m nas.plot RUN`. Figure data first, drawing second.

Left, what this run trained; right, the papers' rows for the same depth and prompt, on axes of their own, because
their perplexities are of another scale, tokenizer and corpus.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

from costmodel import cli
from costmodel.cost import Budget
from costmodel.published_rows import PublishedRow, published_rows
from nas import ledger
from nas.front import front
from nas.ledger import Record
from nas.run import find_run, read_config, read_ledger, run_space

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PRIOR_RANGE_SHARE = 0.005  # a latency range narrower than this share of the latency is no wider than its marker
LONGEST_NAME = 24  # characters of a label
LABELLED = 8  # front members named in the legend; the rest are in pareto.csv


class Group(NamedTuple):
    """Trials drawn alike. latency_min: minutes; half-open price range in minutes per trial, or None."""

    names: tuple[str, ...]
    latency_min: tuple[float, ...]
    perplexity: tuple[float, ...]
    range_min: tuple[tuple[float, float] | None, ...]


class FrontFigure(NamedTuple):
    """Everything the Pareto plot shows."""

    title: str
    budget_min: float
    front: Group
    dominated: Group
    baselines: Group
    stopped_min: tuple[float, ...]
    diverged_min: tuple[float, ...]
    published: Group
    published_title: str


def front_figure(
    records: Sequence[Record], budget: Budget, rows: Sequence[PublishedRow], *, num_layers: int, seq_len: int
) -> FrontFigure:
    """The data of the Pareto plot of a ledger."""
    assert budget.latency_s is not None
    members = front(records, budget)
    done = ledger.completed(records)
    on_front = {record.trial_id for record in members}
    candidates = [one for one in done if one.role == "candidate" and one.trial_id not in on_front]
    ended = [one for one in ledger.finished(records) if one.role == "candidate"]
    same = [
        row for row in rows if (row.num_layers, row.seq_len) == (num_layers, seq_len) and row.perplexity is not None
    ]
    return FrontFigure(
        title=_title(done),
        budget_min=budget.latency_s / 60,
        front=_group(members),
        dominated=_group(candidates),
        baselines=_group([one for one in done if one.role == "baseline"]),
        stopped_min=tuple(one.latency_s / 60 for one in ended if one.status == "stopped"),
        diverged_min=tuple(one.latency_s / 60 for one in ended if one.status == "diverged"),
        published=Group(
            names=tuple(row.notation for row in same),
            latency_min=tuple(row.latency_s / 60 for row in same),
            perplexity=tuple(row.perplexity for row in same if row.perplexity is not None),
            range_min=(None,) * len(same),
        ),
        published_title=f"Papers' rows, L={num_layers}, T={seq_len}\n(full scale, other corpus and tokenizer)",
    )


def draw_front(data: FrontFigure) -> Figure:
    """The Pareto plot, readable at 1000 pixels."""
    figure = plt.figure(figsize=(10, 6), dpi=100, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 11], width_ratios=[3, 2])
    axes = figure.add_subplot(grid[1, 0])
    _draw_run(axes, data)
    _draw_ended_early(figure.add_subplot(grid[0, 0], sharex=axes), data)
    _draw_published(figure.add_subplot(grid[:, 1]), data)
    return figure


def plot_run(folder: Path) -> tuple[Path, ...]:
    """Draws the plots of a run into its `plots` folder and returns their paths.

    Raises ValueError if nothing has been trained to completion yet.
    """
    config = read_config(folder)
    records = read_ledger(folder)
    if not ledger.completed(records):
        raise ValueError(f"{folder} has no completed trial yet, so there is nothing to plot.")
    num_layers = run_space(folder, config).base.num_layers
    data = front_figure(records, config.budget, published_rows(), num_layers=num_layers, seq_len=config.seq_len)
    figure = draw_front(data)
    (folder / "plots").mkdir(exist_ok=True)
    paths = tuple(folder / "plots" / f"pareto.{kind}" for kind in ("png", "svg"))
    for path in paths:
        figure.savefig(path)
    plt.close(figure)
    return paths


def plot(run: str) -> None:
    """Draws the perplexity-latency front of a run.

    Args:
        run: folder of a run, or `latest`.
    """
    for path in plot_run(find_run(run)):
        print(path)


def _group(records: Sequence[Record]) -> Group:
    return Group(
        names=tuple(_name(record) for record in records),
        latency_min=tuple(record.latency_s / 60 for record in records),
        perplexity=tuple(record.perplexity or 0.0 for record in records),
        range_min=tuple(_range_min(record) for record in records),
    )


def _name(record: Record) -> str:
    """The papers' name, or the arch_id where the placement is too long for a label."""
    return record.notation if len(record.notation) <= LONGEST_NAME else record.arch_id


def _range_min(record: Record) -> tuple[float, float] | None:
    if record.latency_s_range is None:
        return None
    low, high = record.latency_s_range
    return (low / 60, high / 60) if high - low > PRIOR_RANGE_SHARE * record.latency_s else None


def _title(done: Sequence[Record]) -> str:
    """The scale and tokens behind the points."""
    scales = sorted({f"scale {one.scale}, width {one.width}, {one.tokens:,} tokens" for one in done})
    corpora = sorted({f"{one.tokenizer}, {one.split}" for one in done})
    return "; ".join(scales) + "\n" + "; ".join(corpora)


def _draw_run(axes: Axes, data: FrontFigure) -> None:
    _draw_group(axes, data.dominated, color="0.6", marker="o", label="dominated")
    _draw_group(axes, data.baselines, color="tab:brown", marker="D", label="baseline, for comparison only")
    axes.step(data.front.latency_min, data.front.perplexity, where="post", color="tab:blue", linewidth=1)
    names = "".join(f"\n{number}  {name}" for number, name in enumerate(data.front.names[:LABELLED], 1))
    _draw_group(axes, data.front, color="tab:blue", marker="o", label="Pareto front" + names)
    axes.axvline(data.budget_min, color="tab:red", linestyle="--", linewidth=1, label=f"budget {data.budget_min:g} min")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:.4g}"))
    axes.yaxis.set_minor_formatter(matplotlib.ticker.StrMethodFormatter("{x:.4g}"))
    axes.set_xlabel("predicted latency per token (minutes)\nbar: over all coefficients consistent with the data")
    axes.set_ylabel("validation perplexity (log scale)")
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.grid(alpha=0.2)
    _label(axes, data.baselines)
    _label(axes, data.front._replace(names=tuple(map(str, range(1, len(data.front.names) + 1)))))
    axes.legend(fontsize=8, loc="best")


def _draw_group(axes: Axes, group: Group, *, color: str, marker: str, label: str) -> None:
    if not group.names:
        return
    axes.plot(group.latency_min, group.perplexity, color=color, marker=marker, markersize=5, linestyle="", label=label)
    for perplexity, bounds in zip(group.perplexity, group.range_min, strict=True):
        if bounds is not None:
            axes.hlines(perplexity, *bounds, color=color, linewidth=1, alpha=0.5)


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
    axes.plot(data.stopped_min, [1] * len(data.stopped_min), color="0.5", marker="|", linestyle="")
    axes.plot(data.diverged_min, [0] * len(data.diverged_min), color="tab:red", marker="x", linestyle="")
    axes.set_yticks([0, 1], [f"diverged ({len(data.diverged_min)})", f"stopped early ({len(data.stopped_min)})"])
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


if __name__ == "__main__":
    cli.run(plot, prog="python -m nas.plot")
