"""Searchers: pure functions from a generator and results to the members of the next generation; and their names."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np

from costmodel.errors import UserError
from nas.run.pareto import Point
from nas.training.distillation.sub_layers import BlockScores
from search_spaces.architecture import Architecture
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.notation import Member

SEARCHERS: dict[str, str] = {  # by module and class, imported when they are first wanted
    "trellis": "nas.searchers.trellis:Trellis",
    "evolution": "nas.searchers.evolution:Evolution",
    "stratified": "nas.searchers.uniform:Stratified",
    "uniform": "nas.searchers.uniform:Uniform",
    "nsga2": "nas.searchers.optuna_samplers:Nsga2",
    "tpe": "nas.searchers.optuna_samplers:Tpe",
    "gp": "nas.searchers.optuna_samplers:GaussianProcess",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """How a training of a member ended, or how it stands after a look.

    log_perplexity: at the end, or what is expected of it after a look; None if it diverged.
    deviation: standard deviation of what is expected, nats; None at the end.
    goes_on: whether what was looked at is being trained to its end.
    """

    member: Member
    latency_s: float
    log_perplexity: float | None
    deviation: float | None = None
    goes_on: bool = False


class Request(NamedTuple):
    """A training to begin, or, of a member that was looked at, to take to its end.

    is_look: to be trained up to the first rung only. expected: log-perplexity at the end, if the searcher says so.
    """

    member: Member
    is_look: bool = False
    expected: float | None = None


class Room(NamedTuple):
    """How many looks, and how many trainings to their end, a search may still ask for.

    per_end: looks for each end after the first, of all there are to be.
    """

    looks: int
    ends: int
    per_end: float = 3.0

    def after(self, *, is_look: bool) -> "Room":
        """What is left once one more has been asked for."""
        return self._replace(looks=self.looks - is_look, ends=self.ends - (not is_look))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchProblem:
    """A problem for a searcher: all it may know before anything is trained.

    feasible: the members within the budget. anchors: what an expert would begin with.
    reference_loss: nats; what is worse adds nothing to a front.
    parent: the model that candidates start from, of the dimensions of the space, and its loss, nats; None from scratch.
    heals_shortly: whether candidates are trained for far less than the parent was, so that what they lack stays.
    blocks: scores of the parent's, for the searchers that are in `nas.study.blocks.READERS`; None for others.
    """

    feasible: FeasibleSpace
    anchors: tuple[Member, ...] = ()
    reference_loss: float
    parent: Architecture | None = None
    parent_loss: float | None = None
    heals_shortly: bool = False
    blocks: BlockScores | None = None


class Strategy(ABC):
    """Proposes the members of one generation. Made of a `SearchProblem`.

    takes_looks: whether it asks for trainings up to their first rung, rather than for all to their end.
    """

    takes_looks: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, problem: SearchProblem) -> None: ...

    @abstractmethod
    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Trained]
    ) -> list[Member]:
        """Proposes at most `size` members within budget, none deploying as one seen does; fewer if it finds fewer.

        seen: every member that was proposed. trained: those of which results may be known, in a fixed order.
        """

    def requests(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Trained], room: Room
    ) -> list[Request]:
        """Asks for at most `size` trainings; for none if nothing is left. By default all go to their end."""
        return [Request(member) for member in self.propose(min(size, room.ends), rng, seen, trained)]


def points_of(trained: Sequence[Trained]) -> list[tuple[Member, Point]]:
    """The members that did not diverge, with their points, of some expected ones."""
    return [
        (training.member, (training.latency_s, training.log_perplexity))
        for training in trained
        if training.log_perplexity is not None
    ]


def check_searcher(name: str) -> None:
    """Raises UserError unless this is a name of `SEARCHERS` or has the form `module:Class`, which is not imported."""
    if name not in SEARCHERS and ":" not in name:
        raise UserError(
            f"--searcher must be one of {', '.join(SEARCHERS)}, or module:Class of your own, but got {name!r:.80}."
        )


def searcher_of(name: str) -> Callable[[SearchProblem], Strategy]:
    """The class of a name. Raises UserError as `check_searcher`, or if it is no `Strategy`."""
    check_searcher(name)
    searcher = _loaded(SEARCHERS.get(name, name))
    if not (isinstance(searcher, type) and issubclass(searcher, Strategy)):
        raise UserError(f"--searcher {name!r:.80} must be a subclass of nas.searchers.strategy.Strategy, but is not.")
    return searcher


def _loaded(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"--searcher {path!r:.80} cannot be loaded: {error}.") from None
