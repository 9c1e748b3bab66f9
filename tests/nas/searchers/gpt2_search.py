"""A few proposals on half of `gpt2-small`, by a module that a process of its own loads in a second."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

from costmodel.cost import Budget
from costmodel.protocols import load_pricer
from nas.searchers import trellis
from nas.searchers.strategy import Observation, RemainingBudget, SearchProblem
from search_spaces.bases import Dimensions
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_of, price_space
from search_spaces.notation import Member, name_of
from search_spaces.space import build_space, load_definition


@patch.object(trellis, "NUM_DRAWS", 3)
def asked_for() -> list[str]:
    """Suggestions in order, of a few draws each, their results made up of prices and names."""
    space = build_space(replace(load_definition("gpt2-small"), dimensions=Dimensions(layers=6)))
    feasible = within_budget(price_space(space, load_pricer(), 128), Budget(latency_s=150.0))
    strategy = trellis.Trellis(SearchProblem(feasible=feasible, reference_loss=6.0))
    remaining, lines = RemainingBudget(proxy_evals=5, final_trainings=2), list[str]()
    known: dict[Member, Observation] = {}
    while remaining.final_trainings:
        rng = np.random.default_rng([0, len(lines)])
        for suggestion in strategy.suggestions(4, rng, [*known], [*known.values()], remaining):
            member, is_proxy = suggestion.member, suggestion.is_proxy
            latency_s, layers = price_of(feasible.priced, member).latency_s, member.architecture.layers
            kept = sum((layer.attention != "none") + (layer.ffn in ("gelu", "relu")) for layer in layers)
            result: dict[str, Any] = {"latency_s": latency_s, "log_perplexity": 4.0 - latency_s / 200 - kept / 20}
            known[member] = Observation(member=member, deviation=0.03 if is_proxy else None, **result)
            remaining = remaining.after(is_proxy=is_proxy)
            lines.append(f"{name_of(member.architecture)} {member.entropy_regularised} {is_proxy}")
    return lines
