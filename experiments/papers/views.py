"""What an experiment on the papers can show of its rows, by the names that its YAML uses."""

from collections.abc import Callable
from typing import NamedTuple

from experiments.papers import costs, diagnostics, flops, perplexities
from experiments.papers.paper_table import PaperTable
from experiments.papers.results import Experiment
from nas.report.panels import PanelFigure


class View(NamedTuple):
    """trained: whether it is of trainings."""

    table: Callable[[Experiment], PaperTable] | None
    figure: Callable[[Experiment], PanelFigure] | None
    trained: bool = True


VIEWS: dict[str, View] = {
    "operations": View(costs.operation_table, None, trained=False),
    "costs": View(costs.cost_table, None, trained=False),
    "savings": View(costs.savings_table, costs.savings_figure, trained=False),
    "front": View(None, costs.front_figure, trained=False),
    "flops": View(flops.flops_table, flops.flops_figure, trained=False),
    "perplexities": View(perplexities.perplexity_table, None),
    "quarters": View(diagnostics.quarters_table, diagnostics.quarters_figure),
    "maps": View(diagnostics.maps_table, diagnostics.maps_figure),
    "steps": View(diagnostics.steps_table, diagnostics.steps_figure),
    "thresholds": View(diagnostics.thresholds_table, diagnostics.thresholds_figure),
    "margins": View(diagnostics.margins_table, diagnostics.margins_figure),
    "slopes": View(diagnostics.slopes_table, diagnostics.slopes_figure),
    "nans": View(diagnostics.nans_table, None),
}
