"""The trainings of an experiment by row and seed: perplexities beside printed ones, and diagnoses."""

import json
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from costmodel.errors import UserError
from experiments.papers.paper_table import Column, PaperTable
from experiments.papers.settings import Settings
from experiments.ranking import Perplexities, pairs_in_order, ranks_of, spearman
from experiments.trainings import Ended, Job, train_all, training_folder
from nas.report.panels import PanelFigure
from nas.storage import RUNS, locked
from nas.training.metrics import DIAGNOSTICS_FILE

SHARED = RUNS / "experiments" / "papers"  # shared by all experiments on the papers, one folder per scale


class Trained(NamedTuple):
    """A training with the folder of its diagnostics, which does not exist for committed results."""

    ended: Ended
    folder: Path

    def diagnoses(self) -> list[dict[str, Any]]:
        """Return the diagnostics of `nas.training.diagnostics`; a UserError is raised if they cannot be read."""
        try:
            return [json.loads(line) for line in (self.folder / DIAGNOSTICS_FILE).read_text().splitlines()]
        except (OSError, ValueError):
            raise UserError(
                f"{self.folder / DIAGNOSTICS_FILE} must hold the diagnostics of a training, but cannot be read; "
                "delete its folder to train it anew."
            ) from None


class Experiment(NamedTuple):
    """An experiment with its trainings by row, one per seed; empty if nothing is trained."""

    name: str
    settings: Settings
    trained: Mapping[str, tuple[Trained, ...]]

    @property
    def perplexities(self) -> Perplexities:
        """Means over seeds by row, infinite if one diverged."""
        return {
            row: statistics.fmean(training.ended.ranked for training in seeds) for row, seeds in self.trained.items()
        }

    @property
    def first(self) -> dict[str, Trained]:
        """The training with the first seed, by row."""
        return {row: by_seed[0] for row, by_seed in self.trained.items()}

    @property
    def scale_line(self) -> str:
        """A note on what was trained, for every output that depends on it."""
        settings, plan = self.settings, self.settings.plan
        any_trained = next(iter(self.first.values()))
        tokens = max(trained.ended.tokens for trained in self.first.values())
        sequences = next(iter(plan.variants.values())).seq_len
        seeds = f"{len(settings.seeds)} seed{'s' if len(settings.seeds) > 1 else ''}"
        return (
            f"trained here at scale {settings.scale}, not the papers': {tokens:,} tokens of {settings.data} in "
            f"sequences of {sequences}, {seeds}" + ("" if any_trained.folder.is_dir() else ", committed outcomes")
        )


class View(NamedTuple):
    """A table and a figure of an experiment; `trained` says whether they show trainings."""

    table: Callable[[Experiment], PaperTable] | None
    figure: Callable[[Experiment], PanelFigure] | None
    trained: bool = True


def trained_experiment(name: str, settings: Settings, console: Console, pool: Executor | None = None) -> Experiment:
    """Train what is missing; trainings are shared by all experiments on the papers.

    `pool` is as in `train_all`. A UserError is raised if another process is running one of them at this scale.
    """
    if not settings.seeds:
        return Experiment(name, settings, {})
    folder, plan = SHARED / settings.scale, settings.plan
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        ended = train_all(plan, folder, console, pool)
    trained: dict[str, tuple[Trained, ...]] = {}
    for row in settings.rows:
        jobs = [Job(settings.variant(row), seed, settings.net(row)) for seed in settings.seeds]
        trained[row] = tuple(Trained(ended[job], training_folder(plan, job, folder)) for job in jobs)
    return Experiment(name, settings, trained)


def perplexity_table(experiment: Experiment) -> PaperTable:
    """Tabulate printed perplexities, means and standard deviations over seeds, and the ranks of both."""
    printed, ours = experiment.settings.printed_perplexities, experiment.perplexities
    ranks, our_ranks = ranks_of(printed), ranks_of({row: ours[row] for row in printed})
    rows = tuple(
        (
            *(row, experiment.settings.net(row), printed.get(row), ours[row]),
            statistics.stdev(trained.ended.ranked for trained in by_seed) if len(by_seed) > 1 else None,
            *(ranks.get(row), our_ranks.get(row)),
        )
        for row, by_seed in experiment.trained.items()
    )
    here = f"at scale {experiment.settings.scale}"
    columns = [Column("row"), Column("net"), Column("perplexity, printed", ".4g"), Column(f"perplexity, {here}", ".4g")]
    columns += [Column("standard deviation", ".2g"), Column("rank, printed"), Column(f"rank, {here}")]
    title = f"{experiment.settings.title}: perplexities"
    return PaperTable("perplexities", title, tuple(columns), rows, tuple(rank_notes(experiment)))


def rank_notes(experiment: Experiment) -> list[str]:
    """Return notes on scale, rank correlation with the papers and divergences; none without trainings."""
    ours, printed = experiment.perplexities, experiment.settings.printed_perplexities
    if not ours:
        return []
    notes = [experiment.scale_line]
    if len(printed) > 1:
        agreeing, pairs = pairs_in_order(printed, ours)
        value = spearman(printed, ours)
        over = f"Spearman with the papers over {len(printed)} rows"
        notes.append(f"{over} {value:.2f}, {agreeing} of {pairs} pairs in their order")
    for row, by_seed in experiment.trained.items():
        notes += [f"{row} diverged: {trained.ended.reason}" for trained in by_seed if trained.ended.perplexity is None]
    return notes
