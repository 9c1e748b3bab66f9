"""The tables of a run, all derived from its ledger: `trials.csv`, `pareto.csv` and the architectures of the front."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from costmodel.cost import Budget
from nas.results import ledger
from nas.results.front import front
from nas.results.ledger import Record
from nas.results.members import TrainedMember, in_noise, members
from search_spaces.architecture import Architecture, dump_architecture

SEED_COLUMNS = (
    "num_seeds",
    "num_diverged_seeds",
    "mean_val_loss",
    "standard_error",
    "perplexity_low",
    "perplexity_high",
)


def write_tables(folder: Path, records: Sequence[Record], budget: Budget, base: Architecture) -> None:
    """Writes all of them anew. `standard_error` is of the mean loss, nats; low and high are two of it either side.

    A row of pareto.csv is a member: the trial of its first seed, but price and form of the dearest seed, and loss and
    perplexity of the mean. `within_noise`: of its cheaper neighbour.
    """
    found, trials = front(records, budget), ledger.finished(records)
    by_candidate = {member.candidate_id: member for member in members(records)}
    ledger.write_csv(
        folder / "trials.csv",
        trials,
        [_seed_cells(by_candidate.get(one.candidate_id)) for one in trials],
    )
    ledger.write_csv(
        folder / "pareto.csv",
        [_as_one(member) for member in found],
        [
            {**_seed_cells(member), "within_noise": inside}
            for member, inside in zip(found, in_noise(found), strict=True)
        ],
    )
    architectures = folder / "architectures"
    shutil.rmtree(architectures, ignore_errors=True)
    architectures.mkdir()
    for member in found:
        text = dump_architecture(ledger.architecture_of(member.first, base))
        (architectures / f"{member.arch_id}.yaml").write_text(text)


def _as_one(member: TrainedMember) -> Record:
    """A member in the form of a trial."""
    return replace(
        member.dearest,
        trial_id=member.trial_id,
        role=member.role,
        seed=member.first.seed,
        val_loss=member.mean_loss,
        perplexity=member.perplexity,
    )


def _seed_cells(member: TrainedMember | None) -> Mapping[str, object]:
    """What the seeds of a trial's candidate come to; empty where none completed."""
    if member is None:
        return dict.fromkeys(SEED_COLUMNS)
    low, high = member.perplexity_bounds or (None, None)
    values = (member.num_seeds, member.num_diverged, member.mean_loss, member.standard_error, low, high)
    return dict(zip(SEED_COLUMNS, values, strict=True))
