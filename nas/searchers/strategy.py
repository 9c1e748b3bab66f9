"""What a searcher is: a pure function from a generator and results to the members of the next generation."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from nas.blocks.halves import BlockScores
from nas.run.pareto import Point
from search_spaces.architecture import Architecture
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.notation import Member


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """How a training of a member ended. log_perplexity: None if it did not complete."""

    member: Member
    latency_s: float
    log_perplexity: float | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchProblem:
    """What a searcher may know before anything is trained.

    feasible: the members within the budget. anchors: what an expert would begin with.
    reference_loss: nats; what is worse adds nothing to a front.
    parent: the model that candidates start from, of the dimensions of the space, and its loss, nats; None from scratch.
    blocks: scores of the parent's, for the searchers that are in `nas.study.blocks.READERS`; None for others.
    known: trainings from that parent by the same recipe, of before and on no front of this search; their prices are
    not known.
    """

    feasible: FeasibleSpace
    anchors: tuple[Member, ...] = ()
    reference_loss: float
    parent: Architecture | None = None
    parent_loss: float | None = None
    blocks: BlockScores | None = None
    known: tuple[Trained, ...] = ()


class Strategy(ABC):
    """Proposes the members of one generation. Made of a `SearchProblem`."""

    @abstractmethod
    def __init__(self, problem: SearchProblem) -> None: ...

    @abstractmethod
    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Trained]
    ) -> list[Member]:
        """At most `size` members within budget, none of which deploys as one seen does; fewer only if none is found.

        seen: every member that was proposed. trained: those of which results may be known, in a fixed order.
        """

    def remark(self, trained: Sequence[Trained]) -> str | None:
        """What a user should know of how the results were found, in a line."""
        return None


def points_of(trained: Sequence[Trained]) -> list[tuple[Member, Point]]:
    """Those that completed, with their points."""
    return [(one.member, (one.latency_s, one.log_perplexity)) for one in trained if one.log_perplexity is not None]
