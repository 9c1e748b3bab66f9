"""Which members are on the front of a run, and which completed ones are not eligible."""

from collections.abc import Sequence

from costmodel.cost import Budget, Costs
from nas.run import ledger
from nas.run.ledger import Record
from nas.run.members import TrainedMember, members
from nas.run.pareto import knee, pareto_front


def crosses(member: TrainedMember, budget: Budget) -> bool:
    """Whether this member is within the latency budget, but the upper end of its latency range is not."""
    return (
        member.latency_s_range is not None
        and budget.latency_s is not None
        and member.latency_s <= budget.latency_s < member.latency_s_range[1]
    )


def is_eligible(member: TrainedMember, budget: Budget) -> bool:
    """Whether every seed completed, its folded model passed the check, and its verified cost is within the budget.

    A candidate with a diverged seed has no mean loss, and so no point.
    """
    return not member.num_diverged and all(is_feasible(trial, budget) for trial in member.trials)


def found_infeasible(records: Sequence[Record], budget: Budget) -> tuple[Record, ...]:
    """Completed trials whose predicted cost was within the budget and whose verified cost is not."""
    return tuple(
        record
        for record in ledger.completed(records)
        if record.role != "baseline" and _was_predicted_feasible(record, budget) and not is_feasible(record, budget)
    )


def _was_predicted_feasible(record: Record, budget: Budget) -> bool:
    if record.predicted_latency_s is None or record.predicted_sent_bytes is None:
        return True
    predicted = Costs(
        latency_s=record.predicted_latency_s,
        sent_bytes=record.predicted_sent_bytes,
        key_bytes=record.predicted_key_bytes,
    )
    return budget.admits(predicted, record.predicted_also)


def is_feasible(record: Record, budget: Budget) -> bool:
    """Whether the verified folded model stays within fixed-point range and within the budget."""
    costs = Costs(latency_s=record.latency_s, sent_bytes=record.sent_bytes, key_bytes=record.key_bytes)
    return record.fold_holds is not False and budget.admits(costs, record.also)


def front(records: Sequence[Record], budget: Budget) -> tuple[TrainedMember, ...]:
    """Pareto-optimal completed candidates within the budget, cheapest first, by means over seeds."""
    return front_of([member for member in members(records) if member.role == "candidate"], budget)


def front_of(trained: Sequence[TrainedMember], budget: Budget) -> tuple[TrainedMember, ...]:
    """The eligible, Pareto-optimal members of any role among these, cheapest first."""
    return tuple(pareto_front([one for one in trained if is_eligible(one, budget)], lambda member: member.point))


def picked(front: Sequence[TrainedMember], choice: str) -> TrainedMember:
    """The `knee` of a front, or the member of lowest perplexity."""
    if choice == "knee":
        return front[knee([member.point for member in front])]
    return min(front, key=lambda member: member.mean_loss)
