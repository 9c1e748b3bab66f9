"""Runs an experiment on the papers: prices, trainings, then its views as tables and figures."""

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

from rich.console import Console

from costmodel.config.schema import decode
from costmodel.errors import UserError
from experiments.papers.paper_table import terminal, write_table
from experiments.papers.results import trained_experiment
from experiments.papers.settings import Settings
from experiments.papers.views import VIEWS
from experiments.trainings import training_pool
from nas.report.draw import draw_panels, save_figure
from nas.storage import RUNS


def settings_of(name: str, data: dict[str, Any]) -> Settings:
    """Raises UserError for bad settings, an unknown view, or a view of trainings where nothing is trained."""
    settings = decode(Settings, data, f"experiment {name}")
    if unknown := [view for view in settings.views if view not in VIEWS]:
        raise UserError(f"`views` of experiment {name} must be of {', '.join(VIEWS)}, but got {unknown[0]!r}.")
    if not settings.seeds and (trained := [view for view in settings.views if VIEWS[view].trained]):
        raise UserError(f"view {trained[0]!r} of experiment {name} is of trainings; state `seeds`.")
    return settings


def run_all(experiments: Mapping[str, dict[str, Any]], console: Console) -> None:
    """Several experiments, one after the other. experiments: their data by name. Raises UserError as `run`."""
    with training_pool() as pool:
        for name, data in experiments.items():
            console.print(f"\n{name}")
            run(name, data, console, pool)


def run(name: str, data: dict[str, Any], console: Console, pool: Executor | None = None) -> None:
    """Writes tables (Markdown, CSV, LaTeX) and figures (PNG, SVG) to `runs/experiments/NAME/SCALE`, and prints them.

    pool: as `train_all` takes it. Raises UserError as `settings_of`, or if another process trains for an experiment on
    the papers at this scale.
    """
    settings = settings_of(name, data)
    experiment = trained_experiment(name, settings, console, pool)
    folder = RUNS / "experiments" / name / settings.scale
    folder.mkdir(parents=True, exist_ok=True)
    for view_name in settings.views:
        view = VIEWS[view_name]
        if view.table:
            table = view.table(experiment)
            write_table(folder, table)
            console.print(terminal(table))
            for note in table.notes:
                console.print(f"- {note}")
        if view.figure:
            save_figure(folder / view_name, draw_panels(view.figure(experiment)))
    console.print(f"written to {folder}")
