"""Successive halving, replayed: many candidates are trained for a while, and the better half of them goes on.

A bracket is BRACKET candidates, drawn evenly over prices. After each rung half of it goes on: those on the best fronts
of price and loss at that rung, among all that came so far.

Source: Jamieson and Talwalkar 2016, arXiv 1502.07943, for halving; Li et al. 2020, arXiv 1810.05934, for ranking among
all that reached the rung; Schmucker et al. 2021, arXiv 2106.12639, for fronts in place of a single loss.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from experiments.searchers.replay import Curve, Entry, Found, Training, budget_of
from nas.run.pareto import Point, ranks
from nas.searchers.strategy import SearchProblem
from nas.searchers.uniform import Stratified
from search_spaces.notation import Member

BRACKET = 8


class _Going(NamedTuple):
    entry: Entry
    training: Training


def replay_halving(problem: SearchProblem, entries: Mapping[Member, Entry], num_trials: int, seed: int) -> Curve:
    """Brackets until as many tokens are trained as of so many full trainings, or the table is used up."""
    rng, strategy = np.random.default_rng([seed, 2]), Stratified(problem)
    found, seen, at_rungs = Found(problem, entries), list[Member](), dict[float, list[Point]]()
    most_tokens = budget_of(entries, num_trials)
    while found.tokens < most_tokens and (members := strategy.propose(BRACKET, rng, seen, [])):
        seen += members
        drawn = [entries[member] for member in members]
        going = [_Going(entry, entry.trainings[int(rng.integers(len(entry.trainings)))]) for entry in drawn]
        shares = [share for share, _ in max((one.training.rungs for one in going), key=len)]
        for place, share in enumerate(shares):
            for one in going:
                if place >= len(one.training.rungs):
                    found.add(one.entry, one.training)  # it diverged before
            going = [one for one in going if place < len(one.training.rungs)]
            points = [(one.entry.latency_s, one.training.rungs[place].loss) for one in going]
            order = ranks([*points, *at_rungs.setdefault(share, [])])[: len(points)]
            at_rungs[share] += points
            best = sorted(range(len(going)), key=order.__getitem__)[: BRACKET // 2 ** (place + 1)]
            for number, one in enumerate(going):
                if number not in best:
                    found.stopped(one.training, share)
            going = [going[number] for number in sorted(best)]
        for one in going:
            found.add(one.entry, one.training)
        found.score()
    return found.curve()
