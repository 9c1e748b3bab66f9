"""Which members are on the front of a run, and which are not although they might have been."""

from collections.abc import Sequence

from costmodel.cost import Budget, Costs
from nas.run import ledger
from nas.run.ledger import Record
from nas.run.members import TrainedMember, members
from nas.run.pareto import knee, nondominated


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
    predicted = Costs(
        latency_s=record.predicted_latency_s,
        sent_bytes=record.predicted_sent_bytes,
        key_bytes=record.predicted_key_bytes,
    )
    return budget.admits(predicted, record.predicted_also)


def is_feasible(record: Record, budget: Budget) -> bool:
    """Whether what a trial's weights were verified to fold to holds, and costs no more than the budget."""
    costs = Costs(latency_s=record.latency_s, sent_bytes=record.sent_bytes, key_bytes=record.key_bytes)
    return record.fold_holds is not False and budget.admits(costs, record.also)


def front(records: Sequence[Record], budget: Budget) -> tuple[TrainedMember, ...]:
    """Every non-dominated completed candidate within budget, cheapest first: by means over seeds."""
    return front_of([member for member in members(records) if member.role == "candidate"], budget)


def front_of(trained: Sequence[TrainedMember], budget: Budget) -> tuple[TrainedMember, ...]:
    """Those of these members, whatever their role, that are eligible and no other dominates, cheapest first."""
    inside = sorted((member for member in trained if is_eligible(member, budget)), key=lambda member: member.point)
    kept = nondominated([member.point for member in inside])
    return tuple(member for member, keep in zip(inside, kept, strict=True) if keep)


def picked(front: Sequence[TrainedMember], choice: str) -> TrainedMember:
    """`knee` of a front with a member, where perplexity stops falling fast; else the best, of the least perplexity."""
    if choice == "knee":
        return front[knee([member.point for member in front])]
    return min(front, key=lambda member: member.mean_loss)
