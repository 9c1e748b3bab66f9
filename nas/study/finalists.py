"""Which members of the front are trained with one more seed next: a function of results alone.

Perplexity is noisy over seeds, and a front picks what was lucky. So each of its members gets one more seed, cheapest
first; then the front of the means is another, and its members that have fewer seeds get the next one; and so on until
all have as many as asked for. A member that was unlucky at first and comes to the front late is trained too, as long as
no more than MOST_FINALISTS times as many are as the first front had.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nas.run.front import MOST_FINALISTS
from nas.run.ledger import Status
from nas.run.pareto import nondominated, point_of_seeds

Key: TypeAlias = tuple[int, int]  # index of a candidate, and how many seeds after the run's own


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a trial ended. log_perplexity is None unless it completed; rung_losses are nats per token, by rung.

    latency_s: verified, if it completed. feasible: whether its folded form holds and is within the budget.
    replicate: how many seeds after the run's own.
    """

    index: int
    status: Status
    latency_s: float
    log_perplexity: float | None
    rung_losses: tuple[float, ...] = ()
    replicate: int = 0
    feasible: bool = True

    @property
    def key(self) -> Key:
        return self.index, self.replicate


def next_round(results: Sequence[Result], asked: Collection[Key], finalist_seeds: int) -> list[Key]:
    """The replicates to train next, one for each member of the front that lacks a seed, cheapest first.

    results: of candidates and replicates that have ended. asked: the replicates there were. Empty if none is lacking.
    """
    most = MOST_FINALISTS * len(finalists(result for result in results if not result.replicate))
    chosen = {index for index, _ in asked}
    keys: list[Key] = []
    for index in finalists(results):
        replicate = 1 + sum(replicated == index for replicated, _ in asked)
        if replicate <= finalist_seeds and len(chosen | {index}) <= max(most, len(chosen)):
            chosen.add(index)
            keys.append((index, replicate))
    return keys


def finalists(results: Iterable[Result]) -> list[int]:
    """The candidates on the front of the means over seeds, cheapest first, as `nas.run.front.front` has it."""
    by_index: dict[int, list[Result]] = {}
    for result in results:
        by_index.setdefault(result.index, []).append(result)
    points = {
        index: point_of_seeds(
            [(trial.latency_s, trial.log_perplexity) for trial in trials if trial.log_perplexity is not None]
        )
        for index, trials in by_index.items()
        if _may_be_on_the_front(trials)
    }
    ordered = sorted(points, key=lambda index: (points[index], index))
    kept = nondominated([points[index] for index in ordered])
    return [index for index, keep in zip(ordered, kept, strict=True) if keep]


def _may_be_on_the_front(trials: Sequence[Result]) -> bool:
    statuses = {trial.status for trial in trials}
    feasible = all(trial.feasible for trial in trials if trial.status == "completed")
    return "completed" in statuses and "diverged" not in statuses and feasible
