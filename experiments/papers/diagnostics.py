"""Tables and figures of attention entropy, thresholds, slopes and NaNs recorded during trainings.

All are from the first seed, on a micro-batch of training text, as `nas.training.diagnostics` writes them.
"""

import statistics
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeAlias

from experiments.papers.paper_table import Cell, Column, PaperTable
from experiments.papers.results import Experiment, View
from experiments.trainings import recipe_of
from nas.report.panels import BarPanel, HeatPanel, LinePanel, PanelFigure, Series

Diagnosis: TypeAlias = dict[str, Any]
Grid: TypeAlias = list[list[float | None]]  # layers x heads

ValuesOf: TypeAlias = Callable[[Diagnosis], dict[str, float | None]]

QUARTERS = ("lowest quarter", "second", "third", "highest quarter")


def quarters_table(experiment: Experiment) -> PaperTable:
    """Tabulate shares of heads in the quarters of the largest head entropy, with the printed ones."""
    printed = experiment.settings.printed_shares
    ours = _quarter_shares(experiment)
    rows = [(row, *ours.get(row, (None,) * 4), *printed.get(row, (None,) * 4)) for row in experiment.first]
    columns = [Column(f"{name} %{whose}", ".0f") for whose in ("", ", printed") for name in QUARTERS]
    return _table(experiment, "quarters", "heads by entropy, quarters of the largest", columns, rows)


def quarters_figure(experiment: Experiment) -> PanelFigure:
    """Plot the shares as stacked bars, with the printed ones."""
    panels = []
    for title, shares in (("here", _quarter_shares(experiment)), ("printed", experiment.settings.printed_shares)):
        if shares:
            series = tuple(
                (name, tuple(quarters[place] for quarters in shares.values())) for place, name in enumerate(QUARTERS)
            )
            panels.append(BarPanel(title, "% of heads", tuple(shares), series, stacked=True))
    return _figure(experiment, "heads by entropy, quarters of the largest", panels)


def _quarter_shares(experiment: Experiment) -> dict[str, tuple[float, ...]]:
    """Return shares in percent, for rows whose last diagnosis has no NaNs."""
    shares = _last_of(experiment, "quarter_shares")
    return {row: tuple(100 * share for share in quarters) for row, quarters in shares.items()}


def _grid_view(name: str, key: str, title: str, unit: str) -> View:
    """Return a view of one number per head at the end: a table by layer, and heat maps with a common colour scale."""

    def table(experiment: Experiment) -> PaperTable:
        grids: dict[str, Grid] = _last_of(experiment, key)
        num_heads = max((len(layer) for grid in grids.values() for layer in grid), default=0)
        rows = [
            (row, index, *layer, *[None] * (num_heads - len(layer)))
            for row, grid in grids.items()
            for index, layer in enumerate(grid)
        ]
        columns = [Column("layer"), *(Column(f"head {head}", ".3f") for head in range(num_heads))]
        return _table(experiment, name, f"{title}, {unit}", columns, rows)

    def figure(experiment: Experiment) -> PanelFigure:
        grids: dict[str, Grid] = _last_of(experiment, key)
        cells = [cell for grid in grids.values() for layer in grid for cell in layer if cell is not None]
        limits = (min(cells, default=0.0), max(cells, default=1.0))
        panels = [HeatPanel(row, "head", "layer", tuple(map(tuple, grid)), limits) for row, grid in grids.items()]
        return _figure(experiment, title, panels, colours=unit)

    return View(table, figure)


MAPS = _grid_view("maps", "head_entropies", "entropy of heads at the end", "nats")
THRESHOLDS = _grid_view("thresholds", "thresholds", "learned thresholds at the end", "shares of E_max")


def steps_table(experiment: Experiment) -> PaperTable:
    """Tabulate the mean entropy of every layer's heads at every diagnosis."""
    rows = [(row, step, *means.values()) for row, step, means in _by_step(experiment, _layer_means)]
    num_layers = max((len(row) - 2 for row in rows), default=0)
    columns = [Column("step"), *(Column(f"layer {layer}", ".3f") for layer in range(num_layers))]
    return _table(experiment, "steps", "entropy of layers by step, nats", columns, rows)


def steps_figure(experiment: Experiment) -> PanelFigure:
    """Plot a panel per row and a curve per layer, which ends where its entropy is not a number."""
    return _curves(experiment, "entropy of layers by step", "mean entropy of heads, nats", _layer_means)


def _layer_means(diagnosis: Diagnosis) -> dict[str, float | None]:
    return {
        f"layer {index}": None if not layer or None in layer else statistics.fmean(layer)
        for index, layer in enumerate(diagnosis["head_entropies"])
    }


def slopes_table(experiment: Experiment) -> PaperTable:
    """Tabulate every learned slope of leaky ReLUs at every diagnosis."""
    rows = [(row, step, *slope) for row, step, slopes in _by_step(experiment, _slopes) for slope in slopes.items()]
    columns = [Column("step"), Column("slope of"), Column("value", ".5f")]
    return _table(experiment, "slopes", "learned negative slopes of leaky ReLUs by step", columns, rows)


def slopes_figure(experiment: Experiment) -> PanelFigure:
    """Plot a panel for each row that learns slopes, and a curve per slope."""
    return _curves(experiment, "learned negative slopes of leaky ReLUs", "negative slope", _slopes)


def _slopes(diagnosis: Diagnosis) -> dict[str, float | None]:
    scalars = diagnosis["scalars"].items()
    return {".".join(name.split(".")[:2]): values[0] for name, values in scalars if name.endswith(".slope")}


def _by_step(experiment: Experiment, values_of: ValuesOf) -> list[tuple[str, int, dict[str, float | None]]]:
    return [
        (row, diagnosis["step"], values_of(diagnosis))
        for row, trained in experiment.first.items()
        for diagnosis in trained.diagnoses()
    ]


def _curves(experiment: Experiment, title: str, axis: str, values_of: ValuesOf) -> PanelFigure:
    panels = []
    for row, by_step in groupby(_by_step(experiment, values_of), key=itemgetter(0)):
        steps = [(float(step), values) for _, step, values in by_step]
        curves = {name: [(step, values.get(name)) for step, values in steps] for name in steps[0][1]}
        if curves:
            panels.append(LinePanel(row, "step", axis, tuple(_series(name, curve) for name, curve in curves.items())))
    return _figure(experiment, title, panels)


def margins_table(experiment: Experiment) -> PaperTable:
    """Tabulate perplexity and entropies by the half width of the band, gamma."""
    shares = _quarter_shares(experiment)
    rows = [
        (row, margin, experiment.perplexities[row], *_entropy_range(experiment, row), shares.get(row, (None,) * 4)[3])
        for row, margin in _margins(experiment).items()
    ]
    columns = [Column("gamma"), Column("perplexity", ".4g"), Column("mean entropy, nats", ".3f")]
    columns += [Column("least", ".3f"), Column("largest", ".3f"), Column("heads in the highest quarter %", ".0f")]
    return _table(experiment, "margins", "perplexity by margin of the regulariser", columns, rows)


def margins_figure(experiment: Experiment) -> PanelFigure:
    """Plot perplexity against gamma, without diverged trainings."""
    points = [(margin, experiment.perplexities[row]) for row, margin in _margins(experiment).items()]
    finite = sorted(point for point in points if point[1] < float("inf"))
    panel = LinePanel("", "gamma", "validation perplexity", (_series("perplexity", finite),))
    return _figure(experiment, "perplexity by margin of the regulariser", [panel])


def _margins(experiment: Experiment) -> dict[str, float]:
    settings, plan = experiment.settings, experiment.settings.plan
    margins = {}
    for row in settings.rows:
        regularised = settings.member(row).entropy_regularised
        recipe = recipe_of(plan, plan.variants[settings.variant(row)], None, entropy_regularised=regularised)
        if recipe.entropy is not None:
            margins[row] = recipe.entropy.margin
    return margins


def _entropy_range(experiment: Experiment, row: str) -> tuple[float | None, ...]:
    layers = _last_of(experiment, "head_entropies").get(row, [])
    cells = [cell for layer in layers for cell in layer if cell is not None]
    return (statistics.fmean(cells), min(cells), max(cells)) if cells else (None,) * 3


def nans_table(experiment: Experiment) -> PaperTable:
    """Tabulate when and where numbers ceased to be finite, if they did."""
    rows: list[tuple[Cell, ...]] = []
    for row, trained in experiment.first.items():
        diagnoses = trained.diagnoses()
        onset = next((diagnosis for diagnosis in diagnoses if any(diagnosis["num_nan"])), None)
        layers = ", ".join(str(index) for index, num in enumerate(onset["num_nan"]) if num) if onset else None
        last = diagnoses[-1]["step"] if diagnoses else None
        first, num = (onset["step"], sum(onset["num_nan"])) if onset else (None, 0)
        rows.append((row, trained.ended.reason or "completed", last, first, layers, num))
    columns = [Column("end"), Column("last diagnosis, step"), Column("first with NaNs, step"), Column("in layers")]
    columns += [Column("attention rows that are NaN", "d")]
    return _table(experiment, "nans", "where training ends in NaNs", columns, rows)


def _last_of(experiment: Experiment, key: str) -> dict[str, Any]:
    values = {
        row: [diagnosis[key] for diagnosis in trained.diagnoses() if diagnosis[key]]
        for row, trained in experiment.first.items()
    }
    return {row: series[-1] for row, series in values.items() if series}


def _series(name: str, curve: Sequence[tuple[float, float | None]]) -> Series:
    points = [(x, y) for x, y in curve if y is not None]
    return Series(name, tuple(x for x, _ in points), tuple(y for _, y in points))


def _table(
    experiment: Experiment, name: str, title: str, columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]]
) -> PaperTable:
    whole, net = f"{experiment.settings.title}: {title}", Column(f"net, at scale {experiment.settings.scale}")
    return PaperTable(name, whole, (net, *columns), tuple(rows), (experiment.scale_line,))


def _figure(experiment: Experiment, title: str, panels: Sequence[Any], *, colours: str = "") -> PanelFigure:
    whole = f"{experiment.settings.title}: {title}\n{experiment.scale_line}"
    return PanelFigure(whole, tuple(panels), colours=colours)
