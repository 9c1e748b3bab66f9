"""What a run has found so far: its front, its best member, its hypervolume, its counts."""

from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.cost import Budget
from costmodel.errors import UserError
from nas.results import ledger
from nas.results.ledger import Record
from nas.results.pareto import Point, hypervolume, knee, nondominated


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Counts of candidates by how they ended, and what the completed ones within budget add up to.

    hypervolume: seconds x nats, see `nas.results.pareto.hypervolume`. best: lowest perplexity within budget, or None.
    """

    running: int
    completed: int
    stopped: int
    diverged: int
    failed: int
    front: tuple[Record, ...]
    hypervolume: float
    best: Record | None

    @property
    def ended(self) -> int:
        return self.completed + self.stopped + self.diverged + self.failed


def point(record: Record) -> Point:
    """(latency in seconds, natural log of the perplexity) of a completed trial."""
    assert record.val_loss is not None
    return (record.latency_s, record.val_loss)


def crosses(record: Record, budget: Budget) -> bool:
    """Whether some coefficients consistent with the cost model's data put this member over the latency budget."""
    return (
        record.latency_s_range is not None
        and budget.latency_s is not None
        and record.latency_s <= budget.latency_s < record.latency_s_range[1]
    )


def ranked(records: Sequence[Record], budget: Budget) -> tuple[Record, ...]:
    """Completed candidates within budget, cheapest first: the only trials that may be on the front.

    At the price that their weights have earned; one whose folded form failed its check has earned none.
    """
    inside = [
        record
        for record in ledger.completed(records)
        if record.role == "candidate" and record.fold_holds is not False and admits(budget, record)
    ]
    return tuple(sorted(inside, key=point))


def unearned(records: Sequence[Record], budget: Budget) -> tuple[Record, ...]:
    """Completed candidates that were within budget by rule, and are not by what their weights fold to."""
    return tuple(
        record
        for record in ledger.completed(records)
        if record.role == "candidate" and (record.fold_holds is False or not admits(budget, record))
    )


def admits(budget: Budget, record: Record) -> bool:
    """Whether a trial costs no more than the budget."""
    return budget.admits(latency_s=record.latency_s, sent_bytes=record.sent_bytes)


def front(records: Sequence[Record], budget: Budget) -> tuple[Record, ...]:
    """Every non-dominated completed candidate within budget, cheapest first."""
    inside = ranked(records, budget)
    kept = nondominated([point(record) for record in inside])
    return tuple(record for record, keep in zip(inside, kept, strict=True) if keep)


def summarise(records: Sequence[Record], budget: Budget, reference: Point) -> Summary:
    """The state of a run from its ledger."""
    ended = ledger.finished(records)
    counts = {
        status: sum(one.status == status for one in ended) for status in ("completed", "stopped", "diverged", "failed")
    }
    started = {record.index for record in records} - {record.index for record in ended}
    members = front(records, budget)
    return Summary(
        running=len(started),
        **counts,
        front=members,
        hypervolume=hypervolume([point(member) for member in members], reference),
        best=min(members, key=lambda one: point(one)[1], default=None),
    )


def pick(records: Sequence[Record], budget: Budget, choice: str) -> Record:
    """The completed candidate a user asks for: `knee` or `best` of the front, or one by its arch_id.

    Raises UserError if the run has no such candidate.
    """
    members = front(records, budget)
    if choice in ("knee", "best"):
        if not members:
            raise UserError("the run has no completed candidate within its budget yet, so there is nothing to pick.")
        points = [point(member) for member in members]
        return members[knee(points)] if choice == "knee" else min(members, key=lambda one: point(one)[1])
    chosen = [record for record in ledger.completed(records) if record.arch_id == choice]
    if not chosen:
        known = ", ".join(record.arch_id for record in members) or "none"
        raise UserError(
            f"--pick must be knee, best or the arch_id of a completed trial (on the front: {known}), "
            f"but got {choice!r}."
        )
    return min(chosen, key=lambda one: point(one)[1])
