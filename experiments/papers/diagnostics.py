"""Attention entropy, thresholds, slopes and NaNs of trainings: tables and figures of what each model recorded.

All of it is of the first seed, on a micro-batch of training text, as `nas.training.diagnostics` writes it.
"""

import statistics
from collections.abc import Sequence
from typing import Any, TypeAlias

from experiments.papers.paper_table import Cell, Column, PaperTable
from experiments.papers.results import Experiment
from experiments.trainings import recipe_of
from nas.report.panels import BarPanel, HeatPanel, LinePanel, PanelFigure, Series

Diagnosis: TypeAlias = dict[str, Any]
Grid: TypeAlias = list[list[float | None]]  # layers x heads

QUARTERS = ("lowest quarter", "second", "third", "highest quarter")


def quarters_table(experiment: Experiment) -> PaperTable:
    """Shares of heads in the quarters of the largest head entropy, beside the printed ones."""
    printed = experiment.settings.printed_shares
    ours = _quarter_shares(experiment)
    rows = [(row, *ours.get(row, (None,) * 4), *printed.get(row, (None,) * 4)) for row in experiment.first]
    columns = [Column(f"{name} %{whose}", ".0f") for whose in ("", ", printed") for name in QUARTERS]
    return _table(experiment, "quarters", "heads by entropy, quarters of the largest", columns, rows)


def quarters_figure(experiment: Experiment) -> PanelFigure:
    """Stacked bars, ours beside the printed ones."""
    panels = []
    for title, shares in (("here", _quarter_shares(experiment)), ("printed", experiment.settings.printed_shares)):
        if shares:
            series = tuple(
                (name, tuple(each[place] for each in shares.values())) for place, name in enumerate(QUARTERS)
            )
            panels.append(BarPanel(title, "% of heads", tuple(shares), series, stacked=True))
    return _figure(experiment, "heads by entropy, quarters of the largest", panels)


def _quarter_shares(experiment: Experiment) -> dict[str, tuple[float, ...]]:
    """%, of the rows that have a last diagnosis without NaNs."""
    last = {row: _last(one.diagnoses(), "quarter_shares") for row, one in experiment.first.items()}
    return {row: tuple(100 * share for share in found["quarter_shares"]) for row, found in last.items() if found}


def maps_table(experiment: Experiment) -> PaperTable:
    """Entropy of every head at the end, a line a layer."""
    return _grid_table(experiment, "maps", "entropy of heads at the end, nats", _grids(experiment, "head_entropies"))


def maps_figure(experiment: Experiment) -> PanelFigure:
    """Layer x head heat maps, on one scale of colours."""
    return _grid_figure(experiment, "entropy of heads at the end", _grids(experiment, "head_entropies"), "nats")


def thresholds_table(experiment: Experiment) -> PaperTable:
    """The learned centre of every head's band, a share of E_max."""
    grids = _grids(experiment, "thresholds")
    return _grid_table(experiment, "thresholds", "learned thresholds at the end, shares of E_max", grids)


def thresholds_figure(experiment: Experiment) -> PanelFigure:
    """Layer x head heat maps, on one scale of colours."""
    return _grid_figure(experiment, "learned thresholds at the end", _grids(experiment, "thresholds"), "share of E_max")


def _grids(experiment: Experiment, key: str) -> dict[str, Grid]:
    last = {row: _last(one.diagnoses(), key) for row, one in experiment.first.items()}
    return {row: found[key] for row, found in last.items() if found}


def _grid_table(experiment: Experiment, name: str, title: str, grids: dict[str, Grid]) -> PaperTable:
    num_heads = max((len(layer) for grid in grids.values() for layer in grid), default=0)
    rows = [
        (row, index, *layer, *[None] * (num_heads - len(layer)))
        for row, grid in grids.items()
        for index, layer in enumerate(grid)
    ]
    columns = [Column("layer"), *(Column(f"head {head}", ".3f") for head in range(num_heads))]
    return _table(experiment, name, title, columns, rows)


def _grid_figure(experiment: Experiment, title: str, grids: dict[str, Grid], unit: str) -> PanelFigure:
    cells = [cell for grid in grids.values() for layer in grid for cell in layer if cell is not None]
    limits = (min(cells, default=0.0), max(cells, default=1.0))
    panels = [
        HeatPanel(row, "head", "layer", tuple(tuple(layer) for layer in grid), limits) for row, grid in grids.items()
    ]
    return _figure(experiment, title, panels, colours=unit)


def steps_table(experiment: Experiment) -> PaperTable:
    """Mean entropy of every layer's heads at every diagnosis."""
    found = {row: one.diagnoses() for row, one in experiment.first.items()}
    num_layers = max((len(each["head_entropies"]) for many in found.values() for each in many), default=0)
    rows = [(row, each["step"], *_layer_means(each)) for row, many in found.items() for each in many]
    columns = [Column("step"), *(Column(f"layer {layer}", ".3f") for layer in range(num_layers))]
    return _table(experiment, "steps", "entropy of layers by step, nats", columns, rows)


def steps_figure(experiment: Experiment) -> PanelFigure:
    """A panel a row, a curve a layer; a curve ends where its entropy is no number."""
    panels = []
    for row, one in experiment.first.items():
        diagnoses = one.diagnoses()
        means = [(float(each["step"]), _layer_means(each)) for each in diagnoses]
        num_layers = len(means[0][1]) if means else 0
        curves = [[(step, layers[layer]) for step, layers in means] for layer in range(num_layers)]
        series = [_series(f"layer {layer}", curve) for layer, curve in enumerate(curves)]
        panels.append(LinePanel(row, "step", "mean entropy of heads, nats", tuple(series)))
    return _figure(experiment, "entropy of layers by step", panels)


def _layer_means(diagnosis: Diagnosis) -> list[float | None]:
    return [None if not layer or None in layer else statistics.fmean(layer) for layer in diagnosis["head_entropies"]]


def slopes_table(experiment: Experiment) -> PaperTable:
    """Every learned slope of leaky ReLUs at every diagnosis."""
    rows = [
        (row, each["step"], name, value)
        for row, one in experiment.first.items()
        for each in one.diagnoses()
        for name, value in _slopes(each).items()
    ]
    columns = [Column("step"), Column("slope of"), Column("value", ".5f")]
    return _table(experiment, "slopes", "learned negative slopes of leaky ReLUs by step", columns, rows)


def slopes_figure(experiment: Experiment) -> PanelFigure:
    """A panel for each row that learns slopes, a curve a slope."""
    panels = []
    for row, one in experiment.first.items():
        found = [(float(each["step"]), _slopes(each)) for each in one.diagnoses()]
        names = list(found[0][1]) if found else []
        series = [_series(name, [(step, slopes.get(name)) for step, slopes in found]) for name in names]
        if series:
            panels.append(LinePanel(row, "step", "negative slope", tuple(series)))
    return _figure(experiment, "learned negative slopes of leaky ReLUs", panels)


def _slopes(diagnosis: Diagnosis) -> dict[str, float]:
    ending = ".slope"
    return {
        ".".join(name.split(".")[:2]): values[0]
        for name, values in diagnosis["scalars"].items()
        if name.endswith(ending)
    }


def margins_table(experiment: Experiment) -> PaperTable:
    """Perplexity and entropies by half width of the band, gamma."""
    shares = _quarter_shares(experiment)
    rows = [
        (row, margin, experiment.perplexities[row], *_entropy_range(experiment, row), shares.get(row, (None,) * 4)[3])
        for row, margin in _margins(experiment).items()
    ]
    columns = [Column("gamma"), Column("perplexity", ".4g"), Column("mean entropy, nats", ".3f")]
    columns += [Column("least", ".3f"), Column("largest", ".3f"), Column("heads in the highest quarter %", ".0f")]
    return _table(experiment, "margins", "perplexity by margin of the regulariser", columns, rows)


def margins_figure(experiment: Experiment) -> PanelFigure:
    """Perplexity against gamma; what diverged is left out."""
    points = [(margin, experiment.perplexities[row]) for row, margin in _margins(experiment).items()]
    finite = sorted(point for point in points if point[1] < float("inf"))
    panel = LinePanel("", "gamma", "validation perplexity", (_series("perplexity", finite),))
    return _figure(experiment, "perplexity by margin of the regulariser", [panel])


def _margins(experiment: Experiment) -> dict[str, float]:
    """Of the rows that are regularised."""
    settings, plan = experiment.settings, experiment.settings.plan
    found = {}
    for row in settings.rows:
        regularised = settings.member(row).entropy_regularised
        recipe = recipe_of(plan, plan.variants[settings.variant(row)], None, entropy_regularised=regularised)
        if recipe.entropy is not None:
            found[row] = recipe.entropy.margin
    return found


def _entropy_range(experiment: Experiment, row: str) -> tuple[float | None, ...]:
    """Mean, least and largest of the heads at the end."""
    cells = [cell for layer in _grids(experiment, "head_entropies").get(row, []) for cell in layer if cell is not None]
    return (statistics.fmean(cells), min(cells), max(cells)) if cells else (None,) * 3


def nans_table(experiment: Experiment) -> PaperTable:
    """When and where numbers ceased to be finite, or that they did not."""
    rows: list[tuple[Cell, ...]] = []
    for row, one in experiment.first.items():
        diagnoses = one.diagnoses()
        found = next((each for each in diagnoses if any(each["num_nan"])), None)
        layers = ", ".join(str(index) for index, num in enumerate(found["num_nan"]) if num) if found else None
        last = diagnoses[-1]["step"] if diagnoses else None
        first, num = (found["step"], sum(found["num_nan"])) if found else (None, 0)
        rows.append((row, one.ended.reason or "completed", last, first, layers, num))
    columns = [Column("end"), Column("last diagnosis, step"), Column("first with NaNs, step"), Column("in layers")]
    columns += [Column("attention rows that are NaN", "d")]
    return _table(experiment, "nans", "where training ends in NaNs", columns, rows)


def _last(diagnoses: Sequence[Diagnosis], key: str) -> Diagnosis | None:
    """The last one that has a value there."""
    return next((each for each in reversed(diagnoses) if each[key]), None)


def _series(name: str, curve: Sequence[tuple[float, float | None]]) -> Series:
    points = [(x, y) for x, y in curve if y is not None]
    return Series(name, tuple(x for x, _ in points), tuple(y for _, y in points))


def _table(
    experiment: Experiment, name: str, title: str, columns: Sequence[Column], rows: Sequence[tuple[Cell, ...]]
) -> PaperTable:
    whole = f"{experiment.settings.title}: {title}"
    return PaperTable(
        name,
        whole,
        (Column(f"net, at scale {experiment.settings.scale}"), *columns),
        tuple(rows),
        (experiment.scale_line,),
    )


def _figure(experiment: Experiment, title: str, panels: Sequence[Any], *, colours: str = "") -> PanelFigure:
    whole = f"{experiment.settings.title}: {title}\n{experiment.scale_line}"
    return PanelFigure(whole, tuple(panels), colours=colours)
