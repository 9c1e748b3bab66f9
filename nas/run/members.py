"""Candidates over the seeds they were trained with: mean loss, its standard error, and who is better than whom.

Losses are nats a token and perplexity is the exponential of their mean, so that seeds weigh alike in either. The first
seed is the one that chose a member for the front, and its luck stays in the mean with its share of the seeds.

Standard deviations are those of single trials over seeds, estimated from every member with two seeds or more:

    pooled    s^2 = sum over members and seeds of (loss - mean of the member)^2 / sum over members of (seeds - 1)
    error     max(s, own standard deviation, where a member has two seeds or more) / sqrt(seeds)
    better    difference of means > 2 sqrt(error of the one ^2 + error of the other ^2)

The larger of the two, since two or three seeds are often closer to one another than the next will be, and members that
train unstably spread more than the rest. Two errors hold 95 % of a normal distribution, of few degrees of freedom less.
Source: NIST/SEMATECH e-Handbook of Statistical Methods, section 1.3.5.3, two-sample t-test for equal means,
https://www.itl.nist.gov/div898/handbook/eda/section3/eda353.htm, for pooling and for the error of a difference.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import variance
from typing import Literal

from nas.run import ledger
from nas.run.ledger import Record, Role
from nas.run.pareto import Point, point_of_seeds

ERRORS_APART = 2.0  # standard errors of a difference beyond which it is said to be one

Verdict = Literal["better", "worse", "no difference shown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedMember:
    """A candidate or baseline with all its trials.

    trials: completed, by seed, at least one. num_diverged: how many seeds more did not come to an end.
    standard_error: of the mean loss, nats; None where no member of the run has two seeds.
    """

    trials: tuple[Record, ...]
    num_diverged: int
    standard_error: float | None

    @property
    def first(self) -> Record:
        """The trial of the first seed, whose weights stand for the member."""
        return self.trials[0]

    @property
    def most_expensive(self) -> Record:
        """The trial that sets the price: the most expensive form that a seed's weights were verified to fold to."""
        return max(self.trials, key=lambda trial: (trial.latency_s, trial.sent_bytes))

    @property
    def num_seeds(self) -> int:
        """Seeds that were trained to the end."""
        return len(self.trials)

    @property
    def point(self) -> Point:
        """(latency in seconds, mean loss in nats)."""
        return point_of_seeds([(trial.latency_s, _loss(trial)) for trial in self.trials])

    @property
    def mean_loss(self) -> float:
        return self.point[1]

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean_loss)

    @property
    def perplexity_bounds(self) -> tuple[float, float] | None:
        """The perplexities ERRORS_APART standard errors below and above the mean loss, of two seeds or more."""
        if self.standard_error is None or self.num_seeds < 2:
            return None
        apart = ERRORS_APART * self.standard_error
        return math.exp(self.mean_loss - apart), math.exp(self.mean_loss + apart)

    @property
    def trial_id(self) -> str:
        return self.first.trial_id

    @property
    def candidate_id(self) -> str:
        return self.first.candidate_id

    @property
    def arch_id(self) -> str:
        return self.first.arch_id

    @property
    def notation(self) -> str:
        return self.first.notation

    @property
    def role(self) -> Role:
        return self.first.role

    @property
    def deployed(self) -> str | None:
        """The form it runs as, of its most expensive seed."""
        return self.most_expensive.deployed

    @property
    def latency_s(self) -> float:
        return self.most_expensive.latency_s

    @property
    def latency_s_range(self) -> tuple[float, float] | None:
        return self.most_expensive.latency_s_range

    @property
    def sent_bytes(self) -> float:
        return self.most_expensive.sent_bytes


def members(records: Iterable[Record]) -> tuple[TrainedMember, ...]:
    """Every candidate and baseline of a ledger with a completed trial, in order of proposal."""
    groups: dict[str, list[Record]] = {}
    for record in ledger.finished(records):
        groups.setdefault(record.candidate_id, []).append(record)
    completed = {name: [trial for trial in trials if trial.status == "completed"] for name, trials in groups.items()}
    pooled = pooled_deviation([[_loss(trial) for trial in trials] for trials in completed.values()])
    return tuple(
        TrainedMember(
            trials=tuple(trials),
            num_diverged=sum(trial.status == "diverged" for trial in groups[name]),
            standard_error=standard_error([_loss(trial) for trial in trials], pooled),
        )
        for name, trials in completed.items()
        if trials
    )


def pooled_deviation(losses: Iterable[Sequence[float]]) -> float | None:
    """Standard deviation of a trial over seeds, nats, from the losses of each member; None if none has two."""
    repeated = [group for group in losses if len(group) >= 2]
    if not repeated:
        return None
    freedom = sum(len(group) - 1 for group in repeated)
    return math.sqrt(sum((len(group) - 1) * variance(group) for group in repeated) / freedom)


def standard_error(losses: Sequence[float], pooled: float | None) -> float | None:
    """Standard error of the mean of a member's losses, at least one, nats; None if no deviation is known."""
    if pooled is None:
        return None
    deviation = math.sqrt(variance(losses)) if len(losses) >= 2 else 0.0
    return max(pooled, deviation) / math.sqrt(len(losses))


def better(member: TrainedMember, other: TrainedMember) -> bool:
    """Whether `member` has a lower mean loss by more than seeds explain."""
    if member.standard_error is None or other.standard_error is None:
        return False
    apart = ERRORS_APART * math.hypot(member.standard_error, other.standard_error)
    return other.mean_loss - member.mean_loss > apart


def verdict(member: TrainedMember, other: TrainedMember) -> Verdict:
    """Compares `member` with `other`, as far as seeds allow."""
    return "better" if better(member, other) else "worse" if better(other, member) else "no difference shown"


def in_noise(front: Sequence[TrainedMember]) -> tuple[bool, ...]:
    """For each member of a front, cheapest first, whether it is not better than the one before it.

    All False where no member has two seeds: there, nothing is known of any difference.
    """
    known = any(member.standard_error is not None for member in front)
    inside = [known and not better(costlier, cheaper) for cheaper, costlier in pairwise(front)]
    return tuple([False][: len(front)] + inside)


def _loss(record: Record) -> float:
    assert record.val_loss is not None
    return record.val_loss
