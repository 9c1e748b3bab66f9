"""Prints what `trellis` asks for on `gpt2-small` as results come in: for a test that runs it under other threads."""

import sys

import numpy as np

from costmodel.cost import Budget
from costmodel.protocols import load_pricer
from nas.run.pareto import Point
from nas.searchers.strategy import Observation, RemainingBudget, SearchProblem
from nas.searchers.trellis import Trellis
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_of, price_space
from search_spaces.notation import Member, name_of
from search_spaces.space import load_space

NUM_LOOKS, NUM_ENDS = 8, 2


def asked_for() -> list[str]:
    """Suggestions in order, their results made up of prices and names."""
    feasible = within_budget(price_space(load_space("gpt2-small"), load_pricer(), 128), Budget(latency_s=300.0))
    strategy = Trellis(SearchProblem(feasible=feasible, reference_loss=6.0))
    remaining, lines = RemainingBudget(proxy_evals=NUM_LOOKS, final_trainings=NUM_ENDS), list[str]()
    trained: dict[Member, Observation] = {}
    while remaining.final_trainings:
        suggestions = strategy.suggestions(
            4, np.random.default_rng([0, len(lines)]), [*trained], [*trained.values()], remaining
        )
        for member, is_proxy in ((each.member, each.is_proxy) for each in suggestions):
            latency_s, loss = _point(member, price_of(feasible.priced, member).latency_s)
            trained[member] = Observation(
                member=member, latency_s=latency_s, log_perplexity=loss, deviation=0.03 if is_proxy else None
            )
            remaining = remaining.after(is_proxy=is_proxy)
            lines.append(f"{name_of(member.architecture)} {member.entropy_regularised} {is_proxy}")
    return lines


def _point(member: Member, latency_s: float) -> Point:
    layers = member.architecture.layers
    kept = sum((layer.attention != "none") + (layer.ffn in ("gelu", "relu")) for layer in layers)
    return latency_s, 4.0 - latency_s / 200 - kept / 20


if __name__ == "__main__":
    sys.stdout.write("\n".join(asked_for()))
