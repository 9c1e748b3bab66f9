"""Times of CKKS primitives under a library on this machine, by level, as a testbed; and a model's run beside them.

Seconds are of the CPU, on one thread, so that other programs of a busy machine hardly count. Weights and tokens of a
comparison are drawn with seed 0; embeddings are drawn smaller, since a bootstrap holds from -1 to 1. Primitives are
measured before and after the run, and the faster ones predict it.
"""

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
import yaml

from costmodel.engine.ckks_library import PACKAGE, VERSION, Library, check, run
from costmodel.engine.compare import SEED, drawn_tokens, drawn_weights
from costmodel.execution import interpreter
from costmodel.execution.interpreter import Array
from costmodel.ops import OpGraph
from costmodel.protocols.ckks import CkksTestbed, place, placed_by_layer
from costmodel.protocols.ckks_forms import PRIMITIVES

NUM_LEVELS, NUM_RUNS = 5, 2
SMALLER = 0.4  # of drawn embeddings
STATED_ERROR = 1e-2  # of logits: a bootstrap of the library has an error of 5e-5, which later products enlarge
SECONDS_BAR = 0.25


def measured(library: Library, bootstrap_s: float | None = None) -> CkksTestbed:
    """Return a testbed: the fastest of two runs of each primitive, at levels from 1 to the highest.

    bootstrap_s: seconds of a bootstrap, if known; measuring it takes minutes.
    """
    slots = np.random.default_rng(SEED).uniform(-1, 1, library.slots)
    levels = sorted({round(level) for level in np.linspace(1, library.levels, NUM_LEVELS)})
    times = [[_one_of_each(library, slots, level) for _ in range(NUM_RUNS)] for level in levels]
    if bootstrap_s is None:
        before = library.seconds["bootstrap"]
        library.bootstrapped([library.encrypted(slots, 0)])
        bootstrap_s = float(f"{library.seconds['bootstrap'] - before:.4g}")
    return CkksTestbed(
        protocol="ckks",
        machine=f"{platform.machine()}, one thread; seconds of the CPU",
        source=f"measured under {PACKAGE} {VERSION}",
        slots=library.slots,
        levels=library.levels,
        at_levels=tuple(levels),
        primitives={name: tuple(float(f"{min(one[name] for one in at):.4g}") for at in times) for name in PRIMITIVES},
        at_slots=(library.slots,),
        bootstrap_s=(bootstrap_s,),
        error=SECONDS_BAR,
    )


def _one_of_each(library: Library, slots: Array, level: int) -> dict[str, float]:
    before = dict(library.seconds)
    value = library.rotation([library.encrypted(slots, level)], 1)
    library.rescaled(library.plain(value, [slots]))
    library.relinearised(library.multiplied(value, value))
    return {name: library.seconds[name] - before.get(name, 0.0) for name in PRIMITIVES}


def dump(testbed: CkksTestbed) -> str:
    return yaml.safe_dump(asdict(testbed), sort_keys=False, width=120, default_flow_style=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class CkksComparison:
    """Counts and seconds by primitive, predicted and measured.

    saved: bootstraps that a placement over the whole graph would save.
    """

    predicted: Mapping[str, int]
    measured: Mapping[str, int]
    predicted_s: Mapping[str, float]
    measured_s: Mapping[str, float]
    saved: int
    logits_max_abs_error: float

    @property
    def seconds_error(self) -> float:
        return sum(self.predicted_s.values()) / sum(self.measured_s.values()) - 1


def compare(graph: OpGraph, library: Library, weights: Mapping[str, Array] | None = None) -> CkksComparison:
    """Run an op graph under the library; a UserError is raised for a step or numbers that it cannot run."""
    placed = placed_by_layer(graph.nodes, library.slots, library.levels)
    generator = np.random.default_rng(SEED)
    drawn, tokens = drawn_weights(graph, generator), drawn_tokens(graph, generator)
    for name in drawn:
        drawn[name] *= SMALLER if name.partition(".")[0] in ("embed", "position") else 1.0
    used = drawn if weights is None else weights
    clear = interpreter.values(graph, used, tokens)
    check(placed, clear)
    first = measured(library)
    library.counts.clear()
    library.seconds.clear()
    result = run(placed, library, graph, used, clear, interpreter.inputs(graph, tokens))
    counts, seconds = +library.counts, dict(library.seconds)
    again = measured(library, first.bootstrap_s[0]).primitives
    least = {name: tuple(map(min, values, again[name])) for name, values in first.primitives.items()}
    return CkksComparison(
        predicted=placed.counts,
        measured=counts,
        predicted_s=replace(first, primitives=least).seconds(placed),
        measured_s=seconds,
        saved=placed.counts["bootstrap"] - place(placed.steps, library.levels).counts["bootstrap"],
        logits_max_abs_error=float(np.abs(result - clear[graph.nodes[-1].name]).max()),
    )
