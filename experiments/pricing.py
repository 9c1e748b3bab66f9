"""How fast prices are, against the bars: many architectures at once, one estimate, and the import.

Times are of the processor, medians over repeats, on one core: what other processes take is not in them. Importing is
timed in processes of its own, bare Python and with the import in turn.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from costmodel.errors import StoppedError, UserError
from costmodel.estimate import estimate
from costmodel.protocols import load_pricer
from experiments.bars import Figure, figure_table, median_cpu_s
from search_spaces.budget.edges import edges_by_depth
from search_spaces.budget.priced_space import PricedSpace, price_space
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.notation import name_of, parse
from search_spaces.space import SearchSpace, load_space, sample

DRAWN_ROWS = 1000  # different ones, which are repeated
CHECKED_ROWS = 20  # of them, priced by their op graphs too
BLOCK_ROWS = 1 << 14  # priced at a time, so that what is in between stays in the cache
MEASURES = ("latency_s", "sent_bytes", "rounds")
# what is timed -> what it imports, and what of the names that are imported when they are first used it uses
IMPORTED = {
    "import costmodel": "import costmodel, costmodel.estimate, costmodel.ops, costmodel.protocols",
    "import costmodel, nas": "import costmodel, nas; dir(costmodel), dir(nas)",
}
HEAVY = ("torch", "scipy", "networkx", "ray", "jax", "matplotlib")


Prices: TypeAlias = dict[str, NDArray[Any]]  # by measure, one of each row; without rounds where they are not known


class Step(NamedTuple):
    """The choices of one depth, as arrays over edges: (number of the boundary before it) x (number of layers) + choice.

    onward: number of the boundary after it x (number of layers). prices: the source's are in the first step's, the
    head's in the last one's.
    """

    onward: NDArray[np.intp]
    prices: Prices


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
    pricer, rng = load_pricer(protocol), np.random.default_rng(0)
    steps = price_steps(price_space(space, pricer, settings.seq_len))
    members = [sample(space, rng) for _ in range(DRAWN_ROWS)]
    number = {layer: index for index, layer in enumerate(space.layers)}
    drawn = np.array([[number[layer] for layer in member.architecture.layers] for member in members])
    for member, sent_bytes in zip(members[:CHECKED_ROWS], price_many(steps, drawn)["sent_bytes"], strict=False):
        graph = lower(deployed(member.architecture), settings.seq_len)
        if (whole := estimate(graph, pricer).total.sent_bytes) != sent_bytes:
            shown = name_of(member.architecture, entropy_regularised=False)
            raise UserError(f"{shown} must send its op graph's {whole} bytes, but is priced {sent_bytes}.")
    rows = drawn[rng.integers(len(drawn), size=settings.rows)]
    per_s = settings.rows / median_cpu_s(lambda: price_many(steps, rows), settings.repeats)
    return Figure(f"{protocol}: architectures/s", per_s, "{:,.0f}", least=settings.least_architectures_per_s)


def price_steps(priced: PricedSpace) -> list[Step]:
    """The prices of a space's edges, depth by depth."""
    layers, steps = priced.space.layers, []
    names = [name for name in MEASURES if all(getattr(price, name) is not None for price in priced.prices.values())]
    for edges in edges_by_depth(priced.space.graph):
        shape = 1 + max(edge.start for edge in edges), len(layers)
        onward, prices = np.zeros(shape, dtype=np.intp), {name: np.zeros(shape) for name in names}
        for edge in edges:
            at = edge.start, layers.index(edge.choice.layer)
            onward[at] = edge.stop * len(layers)
            for name, values in prices.items():
                values[at] = sum(getattr(priced.prices[vertex], name) for vertex in edge.passed)
        steps.append(Step(onward.ravel(), {name: values.ravel() for name, values in prices.items()}))
    return steps


def price_many(steps: Sequence[Step], rows: NDArray[np.intp]) -> Prices:
    """The price of every row (members x layers, numbers of choices in `SearchSpace.layers`).

    Adding up is exact where the prices of ops are multiples of one power of two, as those of every protocol here are.
    """
    sums = {name: np.zeros(len(rows)) for name in steps[0].prices}
    for start in range(0, len(rows), BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        at = np.zeros(len(rows[block]), dtype=np.intp)
        for step, choices in zip(steps, rows[block].T, strict=True):
            edges = at + choices
            at = step.onward[edges]
            for name, values in step.prices.items():
                sums[name][block] += values[edges]
    return sums


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
    if subprocess.run([sys.executable, "-c", code], check=False).returncode:
        raise UserError(f"importing must work and bring none of {', '.join(HEAVY)}, but {code!r} failed.")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system
