"""The interface of searchers, which choose the members to train next from earlier results, and the searchers' names."""

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

Key: TypeAlias = tuple[int, int]  # index of a candidate, and its seed relative to the run's own

SEARCHERS: dict[str, str] = {  # module and class, imported when first needed
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
    """A training to do: of a new member, the final one of an evaluated member, or of a baseline or a further seed.

    A searcher asks for the first two, and the schedule for the others. It sets the fields after `expected`.

    Attributes:
        is_proxy: whether it is a low-fidelity evaluation, which stops at the first rung.
        expected: predicted final log-perplexity, nats, or None.
        index: number of the candidate or baseline, in order from 0; a replicate has the index of its candidate.
        generation: number of the generation in which it is proposed, from 0.
        role: baselines are trained for comparison only.
        replicate: seed of the training minus the run's seed; 0 for the first training of a candidate.
    """

    member: Member
    is_proxy: bool = False
    expected: float | None = None
    index: int = -1
    generation: int = -1
    role: Role = "candidate"
    replicate: int = 0

    @property
    def key(self) -> Key:
        """Index and replicate, which identify a training."""
        return self.index, self.replicate


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The result of a training, or the prediction from its low-fidelity evaluation.

    Attributes:
        latency_s: seconds per token; after a final training, those of the verified folded form, if it was checked.
        log_perplexity: final result or prediction, nats; None if it diverged or failed.
        deviation: standard deviation of the prediction, nats; None for a result.
        promoted: whether an evaluated member has been promoted to its final training.
        index, replicate: as in `Suggestion`.
        feasible: whether the cost is within the budget and the folded form, if it was checked, passed the check.
        rung_losses: validation losses at the rungs, nats per token, in order; empty if it diverged or failed.
    """

    member: Member
    latency_s: float
    log_perplexity: float | None
    deviation: float | None = None
    promoted: bool = False
    index: int = -1
    replicate: int = 0
    status: Status = "completed"
    feasible: bool = True
    rung_losses: tuple[float, ...] = ()

    @property
    def key(self) -> Key:
        """Index and replicate, which identify a training."""
        return self.index, self.replicate


class RemainingBudget(NamedTuple):
    """How many low-fidelity evaluations (`proxy_evals`) and `final_trainings` a search may still ask for.

    per_end: low-fidelity evaluations per final training after the first, over the whole search.
    """

    proxy_evals: int
    final_trainings: int
    per_end: float = 3.0

    def after(self, *, is_proxy: bool) -> "RemainingBudget":
        """Return the budget after one more training. is_proxy: whether that is a low-fidelity evaluation."""
        return RemainingBudget(self.proxy_evals - is_proxy, self.final_trainings - (not is_proxy), self.per_end)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SearchProblem:
    """The facts that a searcher has before anything is trained.

    Attributes:
        feasible: the members within the budget.
        reference_loss: loss of the hypervolume's reference point, nats; candidates above it add nothing.
        parent: the model that candidates start from, in the dimensions of the space; None from scratch.
        parent_loss: the parent's validation loss, nats per token; None from scratch.
        short_finetune: whether candidates train on far fewer tokens than the parent did, so that most of the loss from
            removed sub-layers remains.
        blocks: block scores of the parent, for the searchers in `nas.study.open_trials.BLOCK_READERS`; None for others.
    """

    feasible: FeasibleSpace
    reference_loss: float
    parent: Architecture | None = None
    parent_loss: float | None = None
    short_finetune: bool = False
    blocks: BlockScores | None = None


class Strategy(ABC):
    """A searcher, which is constructed from a `SearchProblem` and proposes one generation at a time.

    takes_proxies: whether the searcher asks for low-fidelity evaluations first, not only for final trainings.
    """

    takes_proxies: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, problem: SearchProblem) -> None: ...

    @abstractmethod
    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Observation]
    ) -> list[Member]:
        """Propose `size` members within the budget, whose models differ from each other and from seen ones.

        Models are compared as folded if costs are folded costs. Fewer members mean that there are no more, which ends
        the search. rng: the only source of randomness, so that proposals can be reproduced. seen: every member that was
        proposed before. trained: results and predictions so far, in a fixed order.
        """

    def suggestions(
        self,
        size: int,
        rng: np.random.Generator,
        seen: Collection[Member],
        trained: Sequence[Observation],
        remaining: RemainingBudget,
    ) -> list[Suggestion]:
        """Return at most `size` trainings to run, or none if nothing is left. By default all are final trainings."""
        return [Suggestion(member) for member in self.propose(min(size, remaining.final_trainings), rng, seen, trained)]


def points_of(trained: Sequence[Observation]) -> list[tuple[Member, Point]]:
    """Return the members that did not diverge or fail, with latency (s) and final or predicted log-perplexity."""
    return [
        (training.member, (training.latency_s, training.log_perplexity))
        for training in trained
        if training.log_perplexity is not None
    ]


def check_searcher(name: str) -> None:
    """Raise UserError unless the name is in `SEARCHERS` or has the form `module:Class`. Imports nothing."""
    if name not in SEARCHERS and ":" not in name:
        raise UserError(
            f"--searcher must be one of {', '.join(SEARCHERS)}, optuna:NAME of a sampler, or module:Class of your own, "
            f"but got {name!r:.80}."
        )


def searcher_of(name: str) -> Callable[[SearchProblem], Strategy]:
    """Return the constructor of a searcher.

    Raises UserError for an unknown name, a module or class that is missing, or a class that is no `Strategy`; the
    constructor raises it for a sampler that `OptunaStrategy` refuses. Other errors of one's own module are not caught.
    """
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
