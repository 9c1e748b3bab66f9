"""Which figures a run has, and where they lie: `plots/` of the run folder."""

import re
from collections.abc import Sequence
from pathlib import Path

from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.protocols.derived import Derived
from costmodel.protocols.published_rows import published_rows
from nas.report.cost_figures import breakdown_figure, chosen, sensitivity_figure
from nas.report.draw import draw_front, draw_panels, draw_what_if, save_figure
from nas.report.front_figures import front_figure, what_if_figure
from nas.run.members import TrainedMember
from nas.run.reprice import WhatIf
from nas.run.run import Run
from search_spaces.workload import Workload

PLOTS = "plots"  # folder of a run


def plot_run(run: Run) -> tuple[Path, ...]:
    """Draws the Pareto plot, and the costs of front and baselines, as the run priced them; returns the paths."""
    return plot_front(run) + _plot_costs(run, run.front, run.pricer, run.workload)


def plot_front(run: Run) -> tuple[Path, ...]:
    """Draws the Pareto plot of a run and returns the paths. Raises UserError if nothing has been trained yet."""
    if not run.completed:
        raise UserError(f"{run.folder} has no completed trial yet, so there is nothing to plot.")
    return save_figure(run.folder / PLOTS / "pareto", draw_front(front_figure(run, published_rows())))


def plot_what_if(what_if: WhatIf) -> tuple[Path, ...]:
    """Draws the two fronts of a run that was priced anew, and its breakdown and sensitivity at the other prices."""
    pricer, workload = what_if.pricer, what_if.workload
    words = [pricer.protocol, *([pricer.network] if pricer.network else []), f"T{workload.prompt_len}"]
    suffix = "-" + re.sub(r"[^\w.-]+", "_", "-".join(words))
    figure = draw_what_if(what_if_figure(what_if))
    fronts = save_figure(what_if.run.folder / PLOTS / f"what-if{suffix}", figure)
    return fronts + _plot_costs(what_if.run, what_if.shown, pricer, workload, suffix)


def _plot_costs(
    run: Run, members: Sequence[TrainedMember], pricer: Pricer, workload: Workload, suffix: str = ""
) -> tuple[Path, ...]:
    """Draws where the costs of members and of the run's baselines come from, and what a network does to them."""
    baselines = [record for record in run.completed if record.role == "baseline"]
    shown = chosen([member.most_expensive for member in members], baselines, run.base)
    if not shown:
        return ()
    plots = run.folder / PLOTS
    paths = save_figure(plots / f"breakdown{suffix}", draw_panels(breakdown_figure(shown, pricer, workload)))
    if isinstance(pricer, Derived):
        figure = draw_panels(sensitivity_figure(shown, pricer, workload))
        paths += save_figure(plots / f"sensitivity{suffix}", figure)
    return paths


def remove_plots(folder: Path) -> None:
    """Removes what was drawn of a run so far, before it has another front."""
    for path in (folder / PLOTS).glob("*.*"):
        path.unlink()
