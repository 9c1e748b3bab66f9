"""How long the exact programs on a space take: CPU seconds of one core, of scores that are drawn anew each time."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from costmodel.config.schema import decode
from costmodel.config.units import parse_bytes, parse_seconds
from costmodel.cost import Budget
from costmodel.protocols import load_pricer
from experiments.driver import beside, timed
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_space
from search_spaces.optima.optima import best, diverse, frontier
from search_spaces.optima.stages import stages_of
from search_spaces.space import load_space

NUM_DIVERSE = 4
LEAST_CHANGES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it. *_s: at most so many CPU seconds."""

    space: str
    seq_len: int
    budget_latency: str
    budget_comm: str
    rounds: int
    seed: int
    solve_s: float
    frontier_s: float
    count_s: float


def run(name: str, data: dict[str, Any], console: Console) -> None:
    """Measures and prints medians beside bars. Raises UserError for bad settings."""
    settings = decode(Settings, data, f"experiment {name}")
    table = Table(title=f"exact programs on {settings.space}, T={settings.seq_len}: CPU seconds")
    for column in ("program", "budgets", "median"):
        table.add_column(column)
    latency_s = parse_seconds(settings.budget_latency, "budget_latency")
    both = Budget(latency_s=latency_s, sent_bytes=parse_bytes(settings.budget_comm, "budget_comm"))
    said_both = f"{settings.budget_latency} and {settings.budget_comm}"
    for said, budget in ((settings.budget_latency, Budget(latency_s=latency_s)), (said_both, both)):
        for program, seconds, bar_s in measured(settings, budget):
            table.add_row(program, said, f"{seconds:.2f} s" if bar_s is None else beside(seconds, bar_s))
    console.print(table)


def measured(settings: Settings, budget: Budget) -> list[tuple[str, float, float | None]]:
    """Program, CPU seconds, bar."""
    priced = price_space(load_space(settings.space), load_pricer(), settings.seq_len)
    counting_s = _median_s(settings, lambda _: within_budget(priced, budget).num_feasible)
    stages = stages_of(within_budget(priced, budget))
    rng = np.random.default_rng(settings.seed)
    scores = [rng.normal(size=stages.shape) for _ in range(settings.rounds)]
    return [
        ("count what fits", counting_s, settings.count_s),
        ("solve", _median_s(settings, lambda one: best(stages, scores[one])), settings.solve_s),
        ("frontier", _median_s(settings, lambda one: frontier(stages, scores[one])), settings.frontier_s),
        (
            f"{NUM_DIVERSE} that differ in {LEAST_CHANGES} layers",
            _median_s(settings, lambda one: diverse(stages, scores[one], NUM_DIVERSE, least_changes=LEAST_CHANGES)),
            None,
        ),
    ]


def _median_s(settings: Settings, work: Callable[[int], object]) -> float:
    return statistics.median(timed(partial(work, one)) for one in range(settings.rounds))
