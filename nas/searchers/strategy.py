"""Searchers: pure functions from a generator and results to the members of the next generation; and their names."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from costmodel.errors import UserError
from nas.run.ledger import Role, Status
from nas.run.pareto import Point
from nas.training.distillation.sub_layers import BlockScores
from search_spaces.architecture import Architecture
from search_spaces.budget.feasible import FeasibleSpace
from search_spaces.notation import Member

Key: TypeAlias = tuple[int, int]  # index of a candidate, and how many seeds after the run's own

SEARCHERS: dict[str, str] = {  # by module and class, imported when they are first wanted
    "trellis": "nas.searchers.trellis:Trellis",
    "evolution": "nas.searchers.evolution:Evolution",
    "stratified": "nas.searchers.uniform:Stratified",
    "uniform": "nas.searchers.uniform:Uniform",
    "nsga2": "optuna:NSGAIISampler",
    "tpe": "optuna:TPESampler",
    "gp": "optuna:GPSampler",
}


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A training that a searcher asks for: of a new member, or the rest of the training of one that was looked at.

    is_look: whether it stops at the first rung. expected: log-perplexity at the end, where the searcher predicts it.

    The schedule adds the rest. index: numbers candidates and baselines in order. replicate: how many seeds after the
    run's own; a replicate has the index of its candidate. role: baselines are trained for comparison only.
    """

    member: Member
    is_look: bool = False
    expected: float | None = None
    index: int = -1
    generation: int = -1
    role: Role = "candidate"
    replicate: int = 0

    @property
    def key(self) -> Key:
        """Index and replicate, which tell trainings apart."""
        return self.index, self.replicate


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What is known of a training: its result, or what is predicted of it after a look.

    log_perplexity: at the end, nats, as it came out or as predicted; None if it diverged or failed.
    deviation: standard deviation of the prediction, nats; None for a result. goes_on: whether a member that was looked
        at is being trained to its end.
    latency_s: of the form that its weights were verified to fold to. feasible: whether that form holds in fixed point
        and is within the budget. rung_losses: nats per token, in order.
    """

    member: Member
    latency_s: float
    log_perplexity: float | None
    deviation: float | None = None
    goes_on: bool = False
    index: int = -1
    replicate: int = 0
    status: Status = "completed"
    feasible: bool = True
    rung_losses: tuple[float, ...] = ()

    @property
    def key(self) -> Key:
        """Index and replicate, which tell trainings apart."""
        return self.index, self.replicate


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
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Observation]
    ) -> list[Member]:
        """Proposes at most `size` members within budget, none deploying as one seen does; fewer if it finds fewer.

        seen: every member that was proposed. trained: those of which results may be known, in a fixed order.
        """

    def suggestions(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Observation], room: Room
    ) -> list[Suggestion]:
        """Asks for at most `size` trainings; for none if nothing is left. By default all go to their end."""
        return [Suggestion(member) for member in self.propose(min(size, room.ends), rng, seen, trained)]


def points_of(trained: Sequence[Observation]) -> list[tuple[Member, Point]]:
    """The members that did not diverge, with their points, of some expected ones."""
    return [
        (training.member, (training.latency_s, training.log_perplexity))
        for training in trained
        if training.log_perplexity is not None
    ]


def check_searcher(name: str) -> None:
    """Raises UserError unless the name is in `SEARCHERS` or of the form `module:Class`, which is not imported."""
    if name not in SEARCHERS and ":" not in name:
        raise UserError(
            f"--searcher must be one of {', '.join(SEARCHERS)}, optuna:NAME of a sampler, or module:Class of your own, "
            f"but got {name!r:.80}."
        )


def searcher_of(name: str) -> Callable[[SearchProblem], Strategy]:
    """What makes the searcher of a name. Raises UserError as `check_searcher`, or if it is no `Strategy`."""
    check_searcher(name)
    module, _, attribute = SEARCHERS.get(name, name).partition(":")
    if module == "optuna":
        return partial(_loaded("nas.searchers.optuna_samplers", "OptunaStrategy"), sampler=attribute)
    searcher = _loaded(module, attribute)
    if not (isinstance(searcher, type) and issubclass(searcher, Strategy)):
        raise UserError(f"--searcher {name!r:.80} must be a subclass of nas.searchers.strategy.Strategy, but is not.")
    return searcher


def _loaded(module: str, attribute: str) -> Any:
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--searcher '{module}:{attribute:.80}' cannot be loaded: {error}.") from None
