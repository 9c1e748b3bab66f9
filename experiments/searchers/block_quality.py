"""How well block scores, and what is made of them, tell what candidates reach once they are trained."""

import numpy as np
from scipy.stats import spearmanr

from experiments.searchers.replay import Entry
from nas.searchers.strategy import SearchProblem
from nas.searchers.surrogate import SEED_NOISE, Observations, features_of, fit
from search_spaces.notation import Member
from search_spaces.optima.stages import Floats, stages_of


def quality_lines(problem: SearchProblem, entries: dict[Member, Entry]) -> list[str]:
    """Rank correlation with trained losses, and the share of their variance that is explained, of

    block scores summed over a member, alone (least squares, each result left out in turn); the prior of `trellis`,
    which is made of them and of counts, before any result; its surrogate (each result left out in turn); and losses at
    rungs. A problem without blocks has no line for them.
    """
    stages = stages_of(problem.feasible)
    features = features_of(stages, problem)
    known = {member: entry.point[1] for member, entry in entries.items() if entry.point is not None}
    members, losses = list(known), np.array(list(known.values()))
    rows = features.rows(members)
    lines = []
    if features.blocks is not None:
        layers = stages.numbered([member.architecture.layers for member in members])
        scores = features.blocks[np.arange(layers.shape[1]), layers].sum(axis=(1, 2))
        lines.append(_line("block scores, summed", scores, losses, _left_out_r2(scores, losses)))
    prior = rows @ features.mean
    lines.append(_line("prior of trellis", prior, losses, _r2(prior, losses)))
    surrogate = fit(features, Observations(rows, losses, np.full(len(losses), SEED_NOISE**2)))
    lines.append(f"surrogate of trellis, with all other results: R^2 {surrogate.r2():.2f}")
    first = [entries[member].trainings[0] for member in members]
    for place, share in enumerate(rung.share for rung in first[0].rungs):
        at_rung = np.array([training.rungs[place].loss for training in first])
        lines.append(_line(f"loss after {share:g} of the tokens", at_rung, losses, _left_out_r2(at_rung, losses)))
    return lines


def _line(title: str, predicted: Floats, losses: Floats, r2: float) -> str:
    return f"{title}: rank correlation {spearmanr(predicted, losses).statistic:.2f}, R^2 {r2:.2f}"


def _r2(predicted: Floats, losses: Floats) -> float:
    return float(1 - ((losses - predicted) ** 2).sum() / ((losses - losses.mean()) ** 2).sum())


def _left_out_r2(x: Floats, y: Floats) -> float:
    """R^2 of each point by a straight line through all others. Source of the shortcut: Allen 1974, PRESS."""
    design = np.column_stack([np.ones(len(x)), x])
    hat = design @ np.linalg.pinv(design)
    errors = (y - hat @ y) / (1 - hat.diagonal())
    return float(1 - errors @ errors / ((y - y.mean()) ** 2).sum())
