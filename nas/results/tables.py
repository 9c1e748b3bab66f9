"""The tables of a run, of its ledger and ngrams: `trials.csv`, `pareto.csv` and the architectures of the front."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from costmodel.cost import Budget
from nas.corpus.ngrams import NgramBaseline
from nas.results import ledger
from nas.results.front import front
from nas.results.ledger import Record, Table
from nas.results.members import TrainedMember, in_noise, members
from nas.results.ngram_columns import ngram_columns
from search_spaces.architecture import Architecture, dump_architecture

SEED_COLUMNS = (
    "num_seeds",
    "num_diverged_seeds",
    "mean_val_loss",
    "standard_error",
    "perplexity_low",
    "perplexity_high",
)


def write_tables(
    folder: Path, records: Sequence[Record], budget: Budget, base: Architecture, ngrams: NgramBaseline | None = None
) -> None:
    """Writes all of them anew."""
    ledger.write_csv(folder / "trials.csv", trial_table(records, ngrams))
    ledger.write_csv(folder / "pareto.csv", front_table(records, budget, ngrams))
    architectures = folder / "architectures"
    shutil.rmtree(architectures, ignore_errors=True)
    architectures.mkdir()
    for member in front(records, budget):
        text = dump_architecture(ledger.architecture_of(member.first, base))
        (architectures / f"{member.arch_id}.yaml").write_text(text)


def trial_table(records: Sequence[Record], ngrams: NgramBaseline | None = None) -> Table:
    """A row for every trial that ended. `standard_error` is of the mean loss, nats; low and high are two of it either
    side; `knows_less_than_trigram`: by the `val_loss` of the row.
    """
    trials = ledger.finished(records)
    by_candidate = {member.candidate_id: member for member in members(records)}
    return ledger.table(
        trials,
        {
            **_seed_columns([by_candidate.get(one.candidate_id) for one in trials]),
            **ngram_columns([one.val_loss if one.status == "completed" else None for one in trials], ngrams),
        },
    )


def front_table(records: Sequence[Record], budget: Budget, ngrams: NgramBaseline | None = None) -> Table:
    """A row for every member of the front, cheapest first, with the columns of `trial_table`.

    A row: the trial of the first seed, price and form of the most expensive one, loss and perplexity of the mean.
    `within_noise`: of its cheaper neighbour.
    """
    found = front(records, budget)
    return ledger.table(
        [_as_one(member) for member in found],
        {
            **_seed_columns(found),
            "within_noise": in_noise(found),
            **ngram_columns([member.mean_loss for member in found], ngrams),
        },
    )


def _as_one(member: TrainedMember) -> Record:
    """A member in the form of a trial."""
    return replace(
        member.most_expensive,
        trial_id=member.trial_id,
        role=member.role,
        seed=member.first.seed,
        val_loss=member.mean_loss,
        perplexity=member.perplexity,
    )


def _seed_columns(found: Sequence[TrainedMember | None]) -> Mapping[str, Sequence[object]]:
    """What the seeds of each row's candidate come to."""
    rows = [_seed_cells(member) for member in found]
    return {name: [row[place] for row in rows] for place, name in enumerate(SEED_COLUMNS)}


def _seed_cells(member: TrainedMember | None) -> tuple[object, ...]:
    """The values of SEED_COLUMNS; empty where no seed completed."""
    if member is None:
        return (None,) * len(SEED_COLUMNS)
    low, high = member.perplexity_bounds or (None, None)
    return member.num_seeds, member.num_diverged, member.mean_loss, member.standard_error, low, high
