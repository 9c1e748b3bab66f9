"""Searchers of optuna behind the same ask and tell: NSGA-II, TPE and a Gaussian process. Needs the extra `searchers`.

A study is built anew for every generation from the results there are, so that proposals are a function of them. Every
choice of every layer is a categorical parameter. A suggestion beyond the budget, or that is there already, is told as
failed; if suggestions go on so, the last one is moved step by step to a member that is new and within the budget.
"""

import warnings
from abc import abstractmethod
from collections.abc import Collection, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, final

import numpy as np

from costmodel.errors import UserError
from nas.searchers.draws import Draws
from nas.searchers.strategy import SearchProblem, Strategy, Trained
from search_spaces.architecture import Layer
from search_spaces.notation import Member
from search_spaces.space import contains, member_of
from search_spaces.variation import mutate

if TYPE_CHECKING:
    import optuna

SUGGESTIONS = 8  # for a place, before the last one is moved to what may be trained
MOVES = 64  # of a suggestion, before a place is filled by a draw
POPULATION = 8  # of NSGA-II: optuna's 50 are more than most searches train
FIELDS = ("norm1", "attention", "norm2", "ffn", "stabiliser")


class OptunaStrategy(Strategy):
    """A sampler of optuna. Raises UserError if optuna is not installed."""

    def __init__(self, problem: SearchProblem) -> None:
        if find_spec("optuna") is None:
            raise UserError(
                "searchers nsga2, tpe and gp need optuna; run: python -m pip install 'private-inference-nas[searchers]'"
            )
        self.feasible, self.reference_loss = problem.feasible, problem.reference_loss
        self.draws = Draws(problem.feasible)
        space, given = problem.feasible.space, problem.feasible.space.definition.first_layers
        self.options = {
            f"{name}.{depth}": sorted({getattr(layer, name) for layer in given[depth : depth + 1] or space.layers})
            for depth in range(space.base.num_layers)
            for name in FIELDS
        }
        listed = space.definition.members is not None
        self.listed = list(problem.feasible.members()) if listed else None

    @abstractmethod
    def sampler(self, seed: int) -> "optuna.samplers.BaseSampler":
        """One of this seed."""

    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Trained]
    ) -> list[Member]:
        import optuna

        study = self._study(int(rng.integers(2**31)), trained)
        chosen: list[Member] = []
        for _ in range(size):
            known = [*seen, *chosen]
            for _ in range(SUGGESTIONS):
                trial = study.ask()
                layers = self._suggested(trial)
                if members := self._nearest_new(layers, known):
                    break
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                members = self._moved(layers, known, rng)
            chosen += members
        return self.draws.filled(chosen, size, rng, seen)

    def _suggested(self, trial: "optuna.Trial") -> tuple[Layer, ...]:
        depth = self.feasible.space.base.num_layers
        return tuple(self._layer(trial, index) for index in range(depth))

    def _layer(self, trial: "optuna.Trial", index: int) -> Layer:
        """What is removed takes its norm and its stabiliser with it."""
        options = {name: f"{name}.{index}" for name in FIELDS}
        drawn = {name: trial.suggest_categorical(key, self.options[key]) for name, key in options.items()}
        drawn |= {"norm1": "none"} if drawn["attention"] == "none" else {}
        drawn |= {"norm2": "none", "stabiliser": "none"} if drawn["ffn"] == "none" else {}
        return Layer(**drawn)

    def _nearest_new(self, layers: tuple[Layer, ...], known: Collection[Member]) -> list[Member]:
        """The member with these layers if it may be trained; of a space that lists its members, the nearest to them."""
        space = self.feasible.space
        if self.listed is None:
            member = member_of(space, layers, entropy_regularised=space.recipes[0])
            return self.draws.new_of([member], known)
        new = self.draws.new_of(self.listed, known)
        return [min(new, key=lambda member: _num_changes(layers, member.architecture.layers))] if new else []

    def _moved(self, layers: tuple[Layer, ...], known: Collection[Member], rng: np.random.Generator) -> list[Member]:
        """A member that may be trained, reached by moves that do not raise its price while it is beyond the budget."""
        space = self.feasible.space
        member = member_of(space, layers, entropy_regularised=space.recipes[0])
        if not contains(space, member):
            return []
        for _ in range(MOVES):
            other = mutate(space, member, rng)
            if new := self.draws.new_of([other], known):
                return new
            place = self.draws.place_of(member)
            if place.fits or self.draws.place_of(other).latency_s <= place.latency_s:
                member = other
        return []

    def _study(self, seed: int, trained: Sequence[Trained]) -> "optuna.Study":
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study = optuna.create_study(directions=["minimize", "minimize"], sampler=self.sampler(seed))
        for training in trained:
            loss = self.reference_loss if training.log_perplexity is None else training.log_perplexity
            study.add_trial(
                optuna.trial.create_trial(
                    values=[training.latency_s, loss],
                    params=self._parameters(training.member),
                    distributions=self._distributions(),
                )
            )
        return study

    def _distributions(self) -> dict[str, Any]:
        import optuna

        return {name: optuna.distributions.CategoricalDistribution(options) for name, options in self.options.items()}

    def _parameters(self, member: Member) -> dict[str, str]:
        layers = enumerate(member.architecture.layers)
        return {f"{name}.{index}": getattr(layer, name) for index, layer in layers for name in FIELDS}


def _num_changes(layers: Sequence[Layer], other: Sequence[Layer]) -> int:
    return sum(getattr(a, name) != getattr(b, name) for a, b in zip(layers, other, strict=True) for name in FIELDS)


@final
class Nsga2(OptunaStrategy):
    """Deb et al. 2002, https://doi.org/10.1109/4235.996017."""

    def sampler(self, seed: int) -> "optuna.samplers.BaseSampler":
        from optuna.samplers import NSGAIISampler

        return NSGAIISampler(seed=seed, population_size=POPULATION)


@final
class Tpe(OptunaStrategy):
    """Tree-structured Parzen estimators. Ozaki et al. 2022, https://doi.org/10.1613/jair.1.13188."""

    def sampler(self, seed: int) -> "optuna.samplers.BaseSampler":
        from optuna.samplers import TPESampler

        return TPESampler(seed=seed, multivariate=True)


@final
class GaussianProcess(OptunaStrategy):
    """A Gaussian process, by the logarithm of expected hypervolume improvement. Ament et al. 2023, arXiv 2310.20708."""

    def sampler(self, seed: int) -> "optuna.samplers.BaseSampler":
        from optuna.samplers import GPSampler

        return GPSampler(seed=seed)
