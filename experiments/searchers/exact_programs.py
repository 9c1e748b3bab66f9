"""How long the exact programs on a space take: CPU seconds of one core, of scores that are drawn anew each time."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.console import Console

from costmodel.config.units import parse_bytes, parse_seconds
from costmodel.cost import Budget
from costmodel.protocols import load_pricer
from experiments.bars import Figure, cpu_s, figure_table
from search_spaces.budget.feasible import within_budget
from search_spaces.budget.priced_space import price_space
from search_spaces.optima.optima import best, frontier
from search_spaces.optima.stages import Scores, stages_of
from search_spaces.space import load_space


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


def run(name: str, settings: Settings, console: Console) -> None:
    """Measures and prints medians beside bars."""
    latency_s = parse_seconds(settings.budget_latency, "budget_latency")
    both = Budget(latency_s=latency_s, sent_bytes=parse_bytes(settings.budget_comm, "budget_comm"))
    figures = [
        *measured(settings, Budget(latency_s=latency_s), settings.budget_latency),
        *measured(settings, both, f"{settings.budget_latency} and {settings.budget_comm}"),
    ]
    title = f"exact programs on {settings.space}, T={settings.seq_len}: CPU seconds, medians"
    console.print(figure_table(title, figures))


def measured(settings: Settings, budget: Budget, budget_name: str) -> list[Figure]:
    """CPU seconds of every program within a budget."""
    priced = price_space(load_space(settings.space), load_pricer(), settings.seq_len)
    stages = stages_of(within_budget(priced, budget))
    rng = np.random.default_rng(settings.seed)
    scores = [rng.normal(size=stages.shape) for _ in range(settings.rounds)]

    def figure(program: str, work: Callable[[Scores], object], bar_s: float) -> Figure:
        taken_s = statistics.median(cpu_s(partial(work, drawn)) for drawn in scores)
        return Figure(f"{program}, {budget_name}", taken_s, "{:.2f} s", most=bar_s)

    return [
        figure("count what fits", lambda _: within_budget(priced, budget).num_feasible, settings.count_s),
        figure("solve", lambda drawn: best(stages, drawn), settings.solve_s),
        figure("frontier", lambda drawn: frontier(stages, drawn), settings.frontier_s),
    ]
