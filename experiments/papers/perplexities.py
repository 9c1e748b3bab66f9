"""Perplexities of rows that are trained here beside the printed ones, and whether both order them alike."""

import statistics

from experiments.papers.paper_table import Column, PaperTable
from experiments.papers.results import Experiment
from experiments.ranking import pairs_in_order, ranks_of, spearman


def perplexity_table(experiment: Experiment) -> PaperTable:
    """Printed, mean and standard deviation over seeds, and the ranks of both among the rows that are printed."""
    printed, ours = experiment.settings.printed_perplexities, experiment.perplexities
    ranks, our_ranks = ranks_of(printed), ranks_of({row: ours[row] for row in printed})
    rows = tuple(
        (
            *(row, experiment.settings.net(row), printed.get(row), ours[row]),
            statistics.stdev(one.perplexity for one in each) if len(each) > 1 else None,
            *(ranks.get(row), our_ranks.get(row)),
        )
        for row, each in experiment.trained.items()
    )
    here = f"at scale {experiment.settings.scale}"
    columns = [Column("row"), Column("net"), Column("perplexity, printed", ".4g"), Column(f"perplexity, {here}", ".4g")]
    columns += [Column("standard deviation", ".2g"), Column("rank, printed"), Column(f"rank, {here}")]
    title = f"{experiment.settings.title}: perplexities"
    return PaperTable("perplexities", title, tuple(columns), rows, tuple(rank_notes(experiment)))


def rank_notes(experiment: Experiment) -> list[str]:
    """Scale of the trainings, rank correlation with the papers, why rows diverged; nothing without trainings."""
    ours, printed = experiment.perplexities, experiment.settings.printed_perplexities
    if not ours:
        return []
    notes = [experiment.scale_line]
    if len(printed) > 1:
        agreeing, pairs = pairs_in_order(printed, ours)
        value = spearman(printed, ours)
        notes.append(
            f"Spearman with the papers over {len(printed)} rows {value:.2f}, {agreeing} of {pairs} pairs in their order"
        )
    for row, each in experiment.trained.items():
        notes += [f"{row} diverged: {one.ended.reason}" for one in each if one.ended.perplexity is None]
    return notes
