"""Which figures a run has, and where they lie: `plots/` of the run folder."""

from collections.abc import Sequence
from pathlib import Path

from costmodel.cost import Budget
from costmodel.errors import UserError
from costmodel.estimate import Pricer
from costmodel.protocols.derived import Derived
from costmodel.protocols.published_rows import published_rows
from nas.corpus.ngrams import NgramBaseline
from nas.report.cost_figures import breakdown_figure, chosen, sensitivity_figure
from nas.report.draw import draw_breakdown, draw_front, draw_sensitivity, draw_what_if, save_figure
from nas.report.front_figures import front_figure, what_if_figure
from nas.results import ledger
from nas.results.ledger import Record
from nas.results.members import TrainedMember
from nas.results.parent import ParentResult
from nas.results.reprice import WhatIf
from search_spaces.architecture import Architecture
from search_spaces.workload import Workload

PLOTS = "plots"  # folder of a run


def plot_front(
    folder: Path,
    records: Sequence[Record],
    budget: Budget,
    *,
    num_layers: int,
    seq_len: int,
    ngrams: NgramBaseline | None = None,
    parent: ParentResult | None = None,
) -> tuple[Path, ...]:
    """Draws the Pareto plot of a run and returns the paths. Raises UserError if nothing has been trained yet."""
    if not ledger.completed(records):
        raise UserError(f"{folder} has no completed trial yet, so there is nothing to plot.")
    data = front_figure(
        records, budget, published_rows(), num_layers=num_layers, seq_len=seq_len, ngrams=ngrams, parent=parent
    )
    return save_figure(folder / PLOTS / "pareto", draw_front(data))


def plot_costs(
    folder: Path,
    members: Sequence[TrainedMember],
    records: Sequence[Record],
    base: Architecture,
    pricer: Pricer,
    workload: Workload,
    suffix: str = "",
) -> tuple[Path, ...]:
    """Draws where the costs of members and of the run's baselines come from, and what a network does to them."""
    baselines = [record for record in ledger.completed(records) if record.role == "baseline"]
    shown = chosen([member.most_expensive for member in members], baselines, base)
    if not shown:
        return ()
    plots = folder / PLOTS
    paths = save_figure(plots / f"breakdown{suffix}", draw_breakdown(breakdown_figure(shown, pricer, workload)))
    if isinstance(pricer, Derived):
        figure = draw_sensitivity(sensitivity_figure(shown, pricer, workload))
        paths += save_figure(plots / f"sensitivity{suffix}", figure)
    return paths


def plot_what_if(folder: Path, found: WhatIf, suffix: str, ngrams: NgramBaseline | None = None) -> tuple[Path, ...]:
    """Draws the two fronts of a run that was priced anew."""
    return save_figure(folder / PLOTS / f"what-if{suffix}", draw_what_if(what_if_figure(found, ngrams)))


def remove_plots(folder: Path) -> None:
    """Removes what was drawn of a run so far, before it has another front."""
    for path in (folder / PLOTS).glob("*.*"):
        path.unlink()
