"""The figures of a run, in `plots/` of its folder."""

from pathlib import Path

from costmodel.errors import UserError
from costmodel.protocols.published_rows import published_rows
from nas.report.draw import draw_front, save_figure
from nas.report.front_figures import front_figure
from nas.run.run import Run

PLOTS = "plots"  # folder of a run


def plot_run(run: Run) -> tuple[Path, ...]:
    """Draw the Pareto plot of a run and return its paths. Raises UserError if no trial has completed."""
    if not run.completed:
        raise UserError(f"{run.folder} has no completed trial yet, so there is nothing to plot.")
    return save_figure(run.folder / PLOTS / "pareto", draw_front(front_figure(run, published_rows())))
