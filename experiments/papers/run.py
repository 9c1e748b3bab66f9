"""Runs an experiment on the papers: costs, trainings, then its views as tables and figures."""

from collections.abc import Mapping
from concurrent.futures import Executor

from rich.console import Console

from costmodel.errors import UserError
from experiments.bars import table
from experiments.papers import costs, diagnostics
from experiments.papers.paper_table import write_table
from experiments.papers.results import View, perplexity_table, trained_experiment
from experiments.papers.settings import Settings
from experiments.trainings import training_pool
from nas.report.draw import draw_panels, save_figure
from nas.storage import RUNS

VIEWS: dict[str, View] = {
    "operations": View(costs.operation_table, None, trained=False),
    "costs": View(costs.cost_table, None, trained=False),
    "savings": View(costs.savings_table, costs.savings_figure, trained=False),
    "front": View(None, costs.front_figure, trained=False),
    "flops": View(costs.flops_table, costs.flops_figure, trained=False),
    "perplexities": View(perplexity_table, None),
    "quarters": View(diagnostics.quarters_table, diagnostics.quarters_figure),
    "maps": diagnostics.MAPS,
    "steps": View(diagnostics.steps_table, diagnostics.steps_figure),
    "thresholds": diagnostics.THRESHOLDS,
    "margins": View(diagnostics.margins_table, diagnostics.margins_figure),
    "slopes": View(diagnostics.slopes_table, diagnostics.slopes_figure),
    "nans": View(diagnostics.nans_table, None),
}


def run_all(experiments: Mapping[str, Settings], console: Console) -> None:
    """Run several experiments by name, one after the other; errors are raised as by `run`."""
    with training_pool() as pool:
        for name, settings in experiments.items():
            console.print(f"\n{name}")
            run(name, settings, console, pool)


def run(name: str, settings: Settings, console: Console, pool: Executor | None = None) -> None:
    """Write tables (Markdown, CSV, LaTeX) and figures (PNG, SVG) to `runs/experiments/NAME/SCALE`, and print the
    tables.

    `pool` is as in `train_all`. A UserError is raised for an unknown view, a view of trainings if nothing is trained,
    or if another process trains for such an experiment at this scale.
    """
    if unknown := [view for view in settings.views if view not in VIEWS]:
        raise UserError(f"`views` of experiment {name} must be of {', '.join(VIEWS)}, but got {unknown[0]!r}.")
    if not settings.seeds and (trained := [view for view in settings.views if VIEWS[view].trained]):
        raise UserError(f"view {trained[0]!r} of experiment {name} is of trainings; state `seeds`.")
    experiment = trained_experiment(name, settings, console, pool)
    folder = RUNS / "experiments" / name / settings.scale
    folder.mkdir(parents=True, exist_ok=True)
    for view_name in settings.views:
        view = VIEWS[view_name]
        if view.table:
            made = view.table(experiment)
            write_table(folder, made)
            console.print(table([column.heading for column in made.columns], made.texts, title=made.title))
            for note in made.notes:
                console.print(f"- {note}")
        if view.figure:
            save_figure(folder / view_name, draw_panels(view.figure(experiment)))
    console.print(f"written to {folder}")
