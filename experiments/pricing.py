"""How fast prices are, against the bars: many architectures at once, one estimate, and the import.

Times are of the processor, medians over repeats, on one core: what other processes take is not in them. Importing is
timed in processes of its own, bare Python and with the import in turn.
"""

import os
import statistics
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from costmodel.errors import StoppedError, UserError
from costmodel.estimate import estimate
from costmodel.protocols import load_pricer
from experiments.bars import Figure, figure_table, median_cpu_s
from search_spaces.budget.price_table import member_of_row, price_many, price_table, rows_of
from search_spaces.budget.priced_space import price_space
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.notation import parse
from search_spaces.space import SearchSpace, load_space, sample

DRAWN_ROWS = 1000  # different ones, which are repeated
CHECKED_ROWS = 20  # of them, priced by their op graphs too
# what is timed -> what it imports, and what of the names that are imported when they are first used it uses
IMPORTED = {
    "import costmodel": "import costmodel, costmodel.estimate, costmodel.ops, costmodel.protocols",
    "import costmodel, nas": "import costmodel, nas; dir(costmodel), dir(nas)",
}
HEAVY = ("torch", "scipy", "networkx", "ray", "jax", "matplotlib")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment as its YAML states it.

    rows: architectures priced at once. architecture: the one that is estimated. The last three are the bars.
    """

    space: str
    architecture: str
    seq_len: int
    protocols: tuple[str, ...]
    rows: int
    repeats: int
    least_architectures_per_s: float
    most_estimate_s: float
    most_import_s: float


def run(name: str, settings: Settings, console: Console) -> None:
    """Measures and prints every figure. Raises StoppedError if a bar is missed."""
    space = load_space(settings.space)
    figures = []
    for protocol in settings.protocols:
        console.print(f"pricing under {protocol}")
        figures += [vectorised(settings, space, protocol), single(settings, space, protocol)]
    figures += [imported(settings, title) for title in IMPORTED]
    console.print(figure_table("processor time, medians", figures))
    if missed := [figure.name for figure in figures if figure.verdict == "FAIL"]:
        raise StoppedError(f"{len(missed)} of {len(figures)} bars are missed: {', '.join(missed)}.")


def vectorised(settings: Settings, space: SearchSpace, protocol: str) -> Figure:
    """Architectures priced a second, as deployed, drawn uniformly; some by their op graphs too, which must agree.

    Raises UserError if one does not.
    """
    pricer = load_pricer(protocol)
    table, rng = price_table(price_space(space, pricer, settings.seq_len)), np.random.default_rng(0)
    drawn = rows_of(table, [sample(space, rng) for _ in range(DRAWN_ROWS)])
    for row, sent_bytes in zip(drawn[:CHECKED_ROWS], price_many(table, drawn).sent_bytes[:CHECKED_ROWS], strict=True):
        graph = lower(deployed(member_of_row(table, row).architecture), settings.seq_len)
        if (whole := estimate(graph, pricer).total.sent_bytes) != sent_bytes:
            raise UserError(f"row {row.tolist()} must send its op graph's {whole} bytes, but is priced {sent_bytes}.")
    rows = drawn[rng.integers(len(drawn), size=settings.rows)]
    per_s = settings.rows / median_cpu_s(lambda: price_many(table, rows), settings.repeats)
    return Figure(f"{protocol}: architectures/s", per_s, "{:,.0f}", least=settings.least_architectures_per_s)


def single(settings: Settings, space: SearchSpace, protocol: str) -> Figure:
    """Seconds of folding, lowering and estimating one architecture; a first call fills caches and is not counted."""
    pricer, architecture = load_pricer(protocol), parse(settings.architecture, space.base).architecture

    def once() -> None:
        estimate(lower(deployed(architecture), settings.seq_len), pricer)

    once()
    taken_s = median_cpu_s(once, settings.repeats)
    return Figure(f"{protocol}: estimate", taken_s, "{:.4f} s", most=settings.most_estimate_s)


def imported(settings: Settings, title: str) -> Figure:
    """Seconds that an entry of IMPORTED adds to starting Python. Raises UserError if it brings what it must not."""
    code = f"{IMPORTED[title]}; import sys; sys.exit(any(name in sys.modules for name in {HEAVY}))"
    pairs = [(_child_s("pass"), _child_s(code)) for _ in range(settings.repeats)]
    taken_s = statistics.median(second - first for first, second in pairs)
    return Figure(f"{title}, above bare Python", taken_s, "{:.3f} s", most=settings.most_import_s)


def _child_s(code: str) -> float:
    """Processor seconds of a Python of its own."""
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], check=False)
    if done.returncode:
        raise UserError(f"importing must work and bring none of {', '.join(HEAVY)}, but {code!r} failed.")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system
