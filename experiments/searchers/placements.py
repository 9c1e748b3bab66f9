"""Placements for a table of trainings: drawn evenly over prices, some at random, most of them good by block scores.

Uniform draws alone would hold next to nothing that a search wants: they lack the first FFN, or attention where it
counts. So four of five are the best of a slice of the price by scores with noise, from little to much; it is of forms,
and smooth over depth, so that it moves whole runs of layers.
"""

from dataclasses import dataclass

import numpy as np
from rich.console import Console

from costmodel.config.units import parse_seconds
from costmodel.cost import Budget
from costmodel.protocols import load_pricer
from experiments.searchers.table import scored_blocks
from nas.conversion.parent import load_parent
from nas.searchers.draws import Draws
from nas.searchers.surrogate import smooth_covariance, sub_layer_forms
from search_spaces.budget.feasible import FeasibleSpace, within_budget
from search_spaces.budget.priced_space import price_space
from search_spaces.notation import Member, placement
from search_spaces.optima.optima import frontier, member_of_optimum
from search_spaces.optima.stages import Scores, Stages, stages_of
from search_spaces.space import load_space

NOISES = (0.02, 0.1, 0.5)  # nats a sub-layer: below most scores, like them, above most
SMOOTHNESS = 4.0  # layers over which noise is alike
TRIES = 50  # noisy scores for a placement, of which none has an optimum that is new in its slice


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it."""

    space: str
    budget_latency: str
    seq_len: int
    parent: str
    num: int
    seed: int


def run(name: str, settings: Settings, console: Console) -> None:
    """Prints the placements, a line each."""
    budget = Budget(latency_s=parse_seconds(settings.budget_latency, "budget_latency"))
    priced = price_space(load_space(settings.space), load_pricer("published"), settings.seq_len)
    feasible = within_budget(priced, budget)
    stages, parent = stages_of(feasible), load_parent(settings.parent).model.architecture
    scores = scored_blocks(settings.parent, stages.layers, "proxy", "stdlib").by_layer(stages, parent).sum(axis=0)
    for member in placements(feasible, stages, scores, settings.num, np.random.default_rng(settings.seed)):
        console.print(f"- {placement(member.architecture)}")


def placements(
    feasible: FeasibleSpace, stages: Stages, scores: Scores, num: int, rng: np.random.Generator
) -> list[Member]:
    """So many members, each deployed form once; any beginning of the list is spread over prices as the whole is."""
    draws = Draws(feasible)
    chosen: list[Member] = []
    while len(chosen) < num:
        if len(chosen) % 5 == 0:
            chosen = draws.filled(chosen, len(chosen) + 1, rng, [])
            continue
        for _ in range(TRIES):
            part = draws.slices[draws.emptiest(chosen, rng)[0]]
            noise = NOISES[int(rng.integers(len(NOISES)))] * smooth_noise(stages, rng)
            optima = frontier(stages, scores + noise)
            members = [member_of_optimum(stages, optimum) for optimum in optima]
            if new := draws.new_of([member for member in members if part.fits(member)], chosen):
                chosen.append(new[-1])
                break
        else:
            return chosen
    return chosen


def smooth_noise(stages: Stages, rng: np.random.Generator) -> Scores:
    """Noise of unit variance for every form of every sub-layer, smooth over depth, added up over both of a layer."""
    depth = len(stages.steps)
    root = np.linalg.cholesky(smooth_covariance(depth, SMOOTHNESS))
    pairs = [sub_layer_forms(layer) for layer in stages.layers]
    noise = {form: root @ rng.normal(size=depth) for form in dict.fromkeys(form for pair in pairs for form in pair)}
    return np.array([sum(noise[form] for form in pair) for pair in pairs]).T
