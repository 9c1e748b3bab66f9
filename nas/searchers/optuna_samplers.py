"""Searchers that use samplers of Optuna, which needs the extra `searchers`.

Every choice of every layer is a categorical parameter. The Optuna study is rebuilt from the results for every
generation, so that proposals depend on the results and the seed alone. Suggestions that are over budget or were made
before are reported to Optuna as failed; after SUGGESTIONS of them, a random draw is used. In a space that lists its
members, the new member nearest to a suggestion is taken.
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from costmodel.errors import UserError
from nas.searchers.draws import Draws
from nas.searchers.strategy import Observation, SearchProblem, Strategy
from search_spaces.architecture import Layer
from search_spaces.notation import Member
from search_spaces.space import member_of

try:
    import optuna
except ImportError:
    raise UserError(
        "searchers nsga2, tpe, gp and optuna:NAME need optuna; run: "
        "python -m pip install 'private-inference-nas[searchers]'"
    ) from None

SUGGESTIONS = 8  # for each proposal
FIELDS = ("norm1", "attention", "norm2", "ffn", "stabiliser", "inner1", "inner2")  # of `Layer`; inner* unless all `own`
SETTINGS: dict[str, dict[str, Any]] = {
    "NSGAIISampler": {"population_size": 8},
    "TPESampler": {"multivariate": True},
}  # keyword arguments by class name


class OptunaStrategy(Strategy):
    """A searcher by a sampler of Optuna.

    sampler: name of the sampler's class. Raises UserError if Optuna has no such class, or it needs more than a seed.
    """

    def __init__(self, problem: SearchProblem, sampler: str) -> None:
        made = getattr(optuna.samplers, sampler, None)
        if not (isinstance(made, type) and issubclass(made, optuna.samplers.BaseSampler)):
            raise UserError(f"--searcher optuna:{sampler} must name a class of optuna.samplers, but there is none.")
        self.sampler: Callable[..., optuna.samplers.BaseSampler] = partial(made, **SETTINGS.get(sampler, {}))
        try:
            self._sampler_of(0)
        except TypeError as error:
            raise UserError(
                f"--searcher optuna:{sampler} must name a sampler that needs no argument but a seed: {error}"
            ) from None
        self.reference_loss, self.draws = problem.reference_loss, Draws(problem.feasible)
        self.space = space = problem.feasible.space
        given, listed = space.definition.first_layers, space.definition.members is not None
        self.listed = list(problem.feasible.members()) if listed else None
        self.options: dict[str, optuna.distributions.BaseDistribution] = {
            f"{name}.{depth}": optuna.distributions.CategoricalDistribution(
                sorted({getattr(layer, name) for layer in given[depth : depth + 1] or space.layers})
            )
            for depth in range(space.base.num_layers)
            for name in FIELDS
            if not name.startswith("inner") or any(getattr(layer, name) != "own" for layer in space.layers)
        }

    def propose(
        self, size: int, rng: np.random.Generator, seen: Collection[Member], trained: Sequence[Observation]
    ) -> list[Member]:
        study = self._study(int(rng.integers(2**31)), trained)
        chosen: list[Member] = []
        for _ in range(size):
            known = [*seen, *chosen]
            for _ in range(SUGGESTIONS):
                trial = study.ask(self.options)
                layers = tuple(_layer(trial.params, depth) for depth in range(self.space.base.num_layers))
                if members := self._nearest_new(layers, known):
                    break
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            chosen += members
        return self.draws.filled(chosen, size, rng, seen)

    def _sampler_of(self, seed: int) -> optuna.samplers.BaseSampler:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return self.sampler(seed=seed)

    def _study(self, seed: int, trained: Sequence[Observation]) -> optuna.Study:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(directions=["minimize", "minimize"], sampler=self._sampler_of(seed))
        for training in trained:
            loss = self.reference_loss if training.log_perplexity is None else training.log_perplexity
            layers = enumerate(training.member.architecture.layers)
            params = {f"{name}.{depth}": getattr(layer, name) for depth, layer in layers for name in FIELDS}
            params = {name: choice for name, choice in params.items() if name in self.options}
            values = [training.latency_s, loss]
            study.add_trial(optuna.trial.create_trial(values=values, params=params, distributions=self.options))
        return study

    def _nearest_new(self, layers: tuple[Layer, ...], known: Collection[Member]) -> list[Member]:
        """Return a list of the member with these layers, or of the nearest new one if listed; empty if none is new."""
        if self.listed is None:
            return self.draws.new_of([member_of(self.space, layers)], known)
        new = self.draws.new_of(self.listed, known)
        return sorted(new, key=lambda member: _num_changes(layers, member.architecture.layers))[:1]


def _layer(params: dict[str, Any], depth: int) -> Layer:
    drawn = {name: params.get(f"{name}.{depth}", "own") for name in FIELDS}
    drawn |= {"norm1": "none", "inner1": "own"} if drawn["attention"] == "none" else {}
    drawn |= {"norm2": "none", "stabiliser": "none", "inner2": "own"} if drawn["ffn"] == "none" else {}
    return Layer(**drawn)


def _num_changes(layers: Sequence[Layer], other: Sequence[Layer]) -> int:
    return sum(getattr(a, name) != getattr(b, name) for a, b in zip(layers, other, strict=True) for name in FIELDS)
