"""Fewer training tokens for all candidates of a search whose time budget is too short for a front.

They are decided before the first candidate begins, because losses after different numbers of tokens do not compare.
"""

import logging
import math
from dataclasses import replace

from costmodel.config.units import format_seconds
from nas.recipe.candidate import Candidate
from nas.run.folder import Meta
from nas.study.meta import new_meta
from nas.study.resolve import ResolvedStudy
from nas.study.throughput import WINDOW_S, training_rate
from nas.study.time_budget import MARGIN, TimeBudget, num_equivalent_steps

_log = logging.getLogger(__name__)

LEAST_ENDS = 3  # candidates that make a front with the parent
LEAST_SHARE = 0.25  # of the tokens, below which candidates say little about each other
CAREFUL_S = 20.0  # of steps that are measured before tokens are cut, in case that the machine was busy for a moment
STARTING_S = 20.0  # of Ray, its workers and a candidate's initial weights
TEACHER_COST = 1 / 3  # of a step, as a share of the step without the parent's predictions: its forward pass
# 150 placements from the builtin parent (`experiments/data/table-12.csv`), in the median, while the rate is still high
COST = "at most about 14 % of perplexity with half of the tokens, and 40 % with a quarter"


def affordable(study: ResolvedStudy, budget: TimeBudget) -> Meta:
    """Return the meta of a study without trials, with fewer training tokens if LEAST_ENDS candidates need that to end.

    Tokens that the user has set stay. The speed of trainings is measured on the CPU of this machine; without a time
    budget, or on other devices, nothing changes.
    """
    config, meta, resources = study.config, study.meta, study.resources
    if math.isinf(budget.left_s) or resources.gpus_per_trial or resources.ray_address is not None:
        return meta
    recipe, places = meta.recipe, resources.at_a_time
    scale, in_a_row = recipe.scale, math.ceil(LEAST_ENDS / places)
    for window_s in (WINDOW_S, CAREFUL_S):
        rate = training_rate(
            Candidate(architecture=meta.base, recipe=recipe), "cpu", num_beside=places - 1, window_s=window_s
        )
        step_s = scale.batch * scale.seq_len / rate * (1 + TEACHER_COST * (recipe.distillation is not None))
        needed_s, left_s = MARGIN * step_s * num_equivalent_steps(scale) * in_a_row, budget.left_s - STARTING_S
        if needed_s <= left_s or config.tokens is not None:
            budget.expect(step_s)
            return meta
    budget.expect(step_s)
    tokens = math.ceil(max(LEAST_SHARE, left_s / needed_s) * scale.tokens)
    _log.info(
        f"note: at {format_seconds(step_s)} a step, fewer than {LEAST_ENDS} candidates would be trained on "
        f"{scale.tokens:,} tokens in {format_seconds(left_s)}, so all are trained on {tokens:,}; this costs accuracy "
        f"({COST}), and perplexities do not compare with those of other runs; --tokens {scale.tokens} keeps them"
    )
    if study.parent is None:  # n-gram baselines count the candidates' tokens
        given = study.feasible, study.corpus, study.second, study.parent
        meta = replace(new_meta(replace(config, tokens=tokens), *given), created=meta.created, read=meta.read)
    return replace(meta, recipe=replace(recipe, scale=replace(scale, tokens=tokens)), planned_tokens=scale.tokens)
