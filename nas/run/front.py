"""What a run has found so far: its front, its best member, its hypervolume, its counts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.cost import Budget
from costmodel.errors import UserError
from nas.run import ledger
from nas.run.ledger import Record
from nas.run.members import TrainedMember, members
from nas.run.pareto import Point, hypervolume, knee, nondominated

MOST_FINALISTS = 2  # so many times the first front's members get more seeds: one that leaves it is followed by another


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Counts of candidates and baselines by how they ended, and what the completed ones within budget add up to.

    running: trials, replicates too. replicates: that have ended. seeds_left: that the members of the front still lack.
    hypervolume: seconds x nats, see `nas.run.pareto.hypervolume`. best: lowest perplexity within budget, or None.
    """

    running: int
    completed: int
    stopped: int
    diverged: int
    failed: int
    replicates: int
    seeds_left: int
    front: tuple[TrainedMember, ...]
    hypervolume: float
    best: TrainedMember | None

    @property
    def ended(self) -> int:
        return self.completed + self.stopped + self.diverged + self.failed


def crosses(member: TrainedMember, budget: Budget) -> bool:
    """Whether some coefficients consistent with the cost model's data put this member over the latency budget."""
    return (
        member.latency_s_range is not None
        and budget.latency_s is not None
        and member.latency_s <= budget.latency_s < member.latency_s_range[1]
    )


def is_eligible(member: TrainedMember, budget: Budget) -> bool:
    """Whether every seed came to an end, folds as checked, and costs no more than the budget.

    A candidate of which one seed diverged has no mean, and so no place: a result with a reason, not a point.
    """
    return not member.num_diverged and all(is_feasible(trial, budget) for trial in member.trials)


def unstable(records: Sequence[Record]) -> tuple[TrainedMember, ...]:
    """Candidates whose first seed completed and of which another diverged."""
    return tuple(member for member in members(records) if member.role == "candidate" and member.num_diverged)


def found_infeasible(records: Sequence[Record], budget: Budget) -> tuple[Record, ...]:
    """Completed trials of candidates that were within budget by rule, and are not by what their weights fold to."""
    return tuple(
        record
        for record in ledger.completed(records)
        if record.role != "baseline" and _was_predicted_feasible(record, budget) and not is_feasible(record, budget)
    )


def _was_predicted_feasible(record: Record, budget: Budget) -> bool:
    """Whether a trial was within the budget by rule: under another budget, or by another run, it need not have been."""
    if record.predicted_latency_s is None or record.predicted_sent_bytes is None:
        return True
    return budget.admits(latency_s=record.predicted_latency_s, sent_bytes=record.predicted_sent_bytes)


def is_feasible(record: Record, budget: Budget) -> bool:
    """Whether what a trial's weights were verified to fold to holds, and costs no more than the budget."""
    return record.fold_holds is not False and budget.admits(latency_s=record.latency_s, sent_bytes=record.sent_bytes)


def front(records: Sequence[Record], budget: Budget) -> tuple[TrainedMember, ...]:
    """Every non-dominated completed candidate within budget, cheapest first: by means over seeds."""
    return front_of([member for member in members(records) if member.role == "candidate"], budget)


def front_of(trained: Sequence[TrainedMember], budget: Budget) -> tuple[TrainedMember, ...]:
    """Of these members, whatever their role, those that earn a place and that no other dominates, cheapest first."""
    inside = sorted((member for member in trained if is_eligible(member, budget)), key=lambda one: one.point)
    kept = nondominated([member.point for member in inside])
    return tuple(member for member, keep in zip(inside, kept, strict=True) if keep)


def picked(found: Sequence[TrainedMember], choice: str) -> TrainedMember:
    """`knee` of a front with a member, where perplexity stops falling fast; else the best, of the least perplexity."""
    if choice == "knee":
        return found[knee([member.point for member in found])]
    return min(found, key=lambda member: member.mean_loss)


def num_planned(records: Sequence[Record], num_trials: int) -> int:
    """Candidates and baselines of a run that is to train so many candidates, with those it began with."""
    others = {
        one.index for one in records if one.role == "baseline" or (one.generation < 0 and one.role == "candidate")
    }
    return num_trials + len(others)


def summarise(records: Sequence[Record], budget: Budget, reference: Point, *, finalist_seeds: int = 0) -> Summary:
    """The state of a run from its ledger."""
    ended = ledger.finished(records)
    begun = {(record.index, record.seed) for record in records if record.event == "started"}
    begun -= {(record.index, record.seed) for record in ended}
    replicates = [record for record in ended if record.role == "replicate"]
    firsts = Counter(record.status for record in ended if record.role != "replicate")
    found = front(records, budget)
    return Summary(
        running=len(begun),
        completed=firsts["completed"],
        stopped=firsts["stopped"],
        diverged=firsts["diverged"],
        failed=firsts["failed"],
        replicates=len(replicates),
        seeds_left=_seeds_left(ended, budget, found, finalist_seeds),
        front=found,
        hypervolume=hypervolume([member.point for member in found], reference),
        best=picked(found, "best") if found else None,
    )


def _seeds_left(ended: Sequence[Record], budget: Budget, found: Sequence[TrainedMember], finalist_seeds: int) -> int:
    """Seeds that the members of the front lack, without those that MOST_FINALISTS leaves out.

    ended: one record of every trial that ended. found: the front of all of them.
    """
    firsts = [record for record in ended if record.role != "replicate"]
    tried = Counter(record.index for record in ended)
    room = MOST_FINALISTS * len(front(firsts, budget)) - sum(tried[record.index] > 1 for record in firsts)
    left = 0
    for member in found:
        seeds = tried[member.first.index]
        if seeds > 1 or room > 0:
            left += max(0, 1 + finalist_seeds - seeds)
            room -= seeds == 1
    return left


def pick(records: Sequence[Record], budget: Budget, choice: str) -> Record:
    """The completed candidate a user asks for: `knee` or `best` of the front, or one by its arch_id.

    Members are chosen by their means; the record, whose weights stand for the member, is that of its first seed.
    Raises UserError if the run has no such candidate.
    """
    found = front(records, budget)
    if choice in ("knee", "best"):
        if not found:
            raise UserError("the run has no completed candidate within its budget yet, so there is nothing to pick.")
        return picked(found, choice).first
    chosen = [member for member in members(records) if member.arch_id == choice]
    if not chosen:
        known = ", ".join(member.arch_id for member in found) or "none"
        raise UserError(
            f"--pick must be knee, best or the arch_id of a completed trial (on the front: {known}), "
            f"but got {choice!r}."
        )
    return min(chosen, key=lambda member: member.point).first
