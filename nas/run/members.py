"""Candidates and baselines with all their seeds: mean losses and their errors, comparisons, and the Pareto front.

Losses are in nats per token, and perplexity is the exponential of their mean, so that all seeds have the same weight.
A candidate gets further seeds because its first seed put it onto the front, and the luck of that seed remains part of
the mean. Standard errors are over seeds and validation documents (`nas.run.intervals`), or over documents only if no
member has two seeds. One member is better than another if its mean is lower by more than two standard errors of the
difference, which combine the seed errors of both and the error of their differences by document.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import correlation, fmean
from typing import Literal

from costmodel.cost import Budget, Costs
from nas.corpus.ngrams import MOST_LOSS
from nas.run import intervals, ledger
from nas.run.intervals import ERRORS_APART, joined
from nas.run.ledger import Record
from nas.run.pareto import Point, knee, pareto_front

Verdict = Literal["better", "worse", "no difference shown", "not tested"]

OF_FIRST = ("trial_id", "role", "seed", "parent_divergence", "parent_agreement")  # fields of a member's first trial


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedMember(Record):
    """A candidate or baseline with all its completed trials, as one record.

    `val_loss` and losses by document are means over seeds, and `perplexity` = exp(val_loss). The fields in OF_FIRST are
    the first trial's. All other fields, such as the cost and the folded form, are the most expensive trial's.

    trials: records of the completed trials, in order of seed, at least one. num_diverged: number of seeds that
        diverged. seed_error: standard error of the mean loss over seeds, nats; None if no member has two seeds.
    """

    val_loss: float
    perplexity: float
    trials: tuple[Record, ...]
    num_diverged: int
    seed_error: float | None

    @property
    def first(self) -> Record:
        """The completed trial of the lowest seed, whose weights are used for the member."""
        return self.trials[0]

    @property
    def most_expensive(self) -> Record:
        """The trial whose cost is the member's: that of the highest latency and, among equals, of the most bytes."""
        return max(self.trials, key=lambda trial: (trial.latency_s, trial.sent_bytes))

    @property
    def num_seeds(self) -> int:
        """Number of completed seeds."""
        return len(self.trials)

    @property
    def point(self) -> Point:
        """(latency in seconds, mean loss in nats)."""
        return self.latency_s, self.val_loss

    @property
    def document_error(self) -> float | None:
        """Standard error of the mean loss over validation documents, nats; None without losses of two documents."""
        return intervals.document_error(self.documents)

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean loss, nats: `seed_error` and `document_error` combined; None if both are None."""
        return joined(self.seed_error, self.document_error)

    @property
    def perplexity_bounds(self) -> tuple[float, float] | None:
        """Perplexities ERRORS_APART standard errors below and above the mean loss; None if no error is known.

        The upper one is at most the exponential of MOST_LOSS.
        """
        if self.standard_error is None:
            return None
        apart = ERRORS_APART * self.standard_error
        return math.exp(self.val_loss - apart), math.exp(min(self.val_loss + apart, MOST_LOSS))

    @property
    def second_loss(self) -> float | None:
        """Mean loss over seeds on the second corpus, nats per token; None if not validated there."""
        return sum(share * loss for share, loss in self.second_documents) if self.second_documents else None

    @property
    def second_perplexity(self) -> float | None:
        """Exponential of `second_loss`, or of MOST_LOSS if that is smaller; None without it."""
        return None if self.second_loss is None else math.exp(min(self.second_loss, MOST_LOSS))

    @property
    def second_error(self) -> float | None:
        """Standard error of `second_loss`, nats: `seed_error` and the error over its documents, combined."""
        return joined(self.seed_error, intervals.document_error(self.second_documents))


def members(records: Iterable[Record]) -> tuple[TrainedMember, ...]:
    """Return every candidate and baseline with a completed trial, in order of proposal."""
    groups: dict[str, list[Record]] = {}
    for record in ledger.finished(records):
        groups.setdefault(record.candidate_id, []).append(record)
    completed = {name: [trial for trial in trials if trial.status == "completed"] for name, trials in groups.items()}
    pooled = intervals.pooled_deviation([[_loss(trial) for trial in trials] for trials in completed.values()])
    found = []
    for name, trials in completed.items():
        if not trials:
            continue
        first, costliest = trials[0], max(trials, key=lambda trial: (trial.latency_s, trial.sent_bytes))
        losses = [_loss(trial) for trial in trials]
        values = {field.name: getattr(costliest, field.name) for field in fields(Record)}
        values |= {of_first: getattr(first, of_first) for of_first in OF_FIRST}
        values |= {"val_loss": fmean(losses), "perplexity": math.exp(fmean(losses))}
        for of_text in ("documents", "second_documents"):
            values[of_text] = intervals.mean_documents([getattr(trial, of_text) for trial in trials])
        found.append(
            TrainedMember(
                **values,
                trials=tuple(trials),
                num_diverged=sum(trial.status == "diverged" for trial in groups[name]),
                seed_error=intervals.seed_error(losses, pooled),
            )
        )
    return tuple(found)


def difference_error(member: TrainedMember, other: TrainedMember) -> float | None:
    """Standard error of the difference of two mean losses, paired by document, nats; None if no error is known."""
    by_document = intervals.document_error(intervals.differences(member.documents, other.documents))
    return joined(member.seed_error, other.seed_error, by_document)


def verdict(member: TrainedMember, other: TrainedMember) -> Verdict:
    """Return whether the mean loss of `member` is lower (`better`) or higher (`worse`) than that of `other`.

    A difference of at most ERRORS_APART of its standard errors is `no difference shown`; if no standard error is known,
    the result is `not tested`.
    """
    if (error := difference_error(member, other)) is None:
        return "not tested"
    if abs(below := other.val_loss - member.val_loss) <= ERRORS_APART * error:
        return "no difference shown"
    return "better" if below > 0 else "worse"


def in_noise(front: Sequence[TrainedMember]) -> tuple[bool, ...]:
    """For each member of a front, cheapest first: whether a comparison with the next cheaper showed it no better."""
    inside = [verdict(costlier, cheaper) in ("worse", "no difference shown") for cheaper, costlier in pairwise(front)]
    return tuple([False][: len(front)] + inside)


def crosses(member: TrainedMember, budget: Budget) -> bool:
    """Whether a member is within the latency budget, but the upper end of its latency range is not."""
    return (
        member.latency_s_range is not None
        and budget.latency_s is not None
        and member.latency_s <= budget.latency_s < member.latency_s_range[1]
    )


def is_eligible(member: TrainedMember, budget: Budget) -> bool:
    """Whether a member may be on the front: no seed diverged, and every completed trial is feasible (`is_feasible`)."""
    return not member.num_diverged and all(is_feasible(trial, budget) for trial in member.trials)


def found_infeasible(records: Sequence[Record], budget: Budget) -> tuple[Record, ...]:
    """Return the completed trials, except baselines, that were predicted to be within the budget but are not feasible.

    Trials without a prediction (those of a run with unfolded costs) count as predicted to be within the budget.
    """

    def was_predicted_feasible(record: Record) -> bool:
        latency_s, sent_bytes = record.predicted_latency_s, record.predicted_sent_bytes
        if latency_s is None or sent_bytes is None:
            return True
        predicted = Costs(latency_s=latency_s, sent_bytes=sent_bytes, key_bytes=record.predicted_key_bytes)
        return budget.admits(predicted, record.predicted_also)

    return tuple(
        record
        for record in ledger.completed(records)
        if record.role != "baseline" and was_predicted_feasible(record) and not is_feasible(record, budget)
    )


def is_feasible(record: Record, budget: Budget) -> bool:
    """Whether a trial's cost is within the budget and its folded model, if one was checked, passed the check."""
    costs = Costs(latency_s=record.latency_s, sent_bytes=record.sent_bytes, key_bytes=record.key_bytes)
    return record.fold_holds is not False and budget.admits(costs, record.also)


def front(records: Sequence[Record], budget: Budget) -> tuple[TrainedMember, ...]:
    """Return the Pareto front of the eligible candidates (`is_eligible`) by latency and mean loss, cheapest first."""
    return front_of([member for member in members(records) if member.role == "candidate"], budget)


def front_of(trained: Sequence[TrainedMember], budget: Budget) -> tuple[TrainedMember, ...]:
    """Return the Pareto front of the eligible ones of these members, as `front` does."""
    return tuple(pareto_front([one for one in trained if is_eligible(one, budget)], lambda member: member.point))


def picked(front: Sequence[TrainedMember], choice: str) -> TrainedMember:
    """Return the knee of a front for `knee`, its member of lowest perplexity for `best`. front: at least one member."""
    if choice == "knee":
        return front[knee([member.point for member in front])]
    return min(front, key=lambda member: member.val_loss)


def rank_correlation(trained: Sequence[TrainedMember]) -> float | None:
    """Return the Spearman correlation of the members' mean losses on the first and second corpus.

    None if fewer than three members have both losses, or all losses on a corpus are equal.
    Source: Spearman 1904, "The proof and measurement of association between two things".
    """
    losses = [(member.val_loss, loss) for member in trained if (loss := member.second_loss) is not None]
    if len(losses) < 3 or any(len(set(side)) == 1 for side in zip(*losses, strict=True)):
        return None
    first, second = (
        [
            sum(other < loss for other in side) + sum(other <= loss for other in side) for loss in side
        ]  # twice mean ranks
        for side in zip(*losses, strict=True)
    )
    return correlation(first, second)


def holds_on_first_alone(member: TrainedMember, front: Sequence[TrainedMember]) -> bool:
    """Whether some front member, no slower, is better on the second corpus by over ERRORS_APART standard errors."""
    ours = member.second_loss
    for other in front:
        theirs = other.second_loss
        if theirs is None or ours is None or other.latency_s > member.latency_s:
            continue
        documents = intervals.differences(other.second_documents, member.second_documents)
        error = joined(other.seed_error, member.seed_error, intervals.document_error(documents))
        if error is not None and ours - theirs > ERRORS_APART * error:
            return True
    return False


def _loss(record: Record) -> float:
    assert record.val_loss is not None
    return record.val_loss
