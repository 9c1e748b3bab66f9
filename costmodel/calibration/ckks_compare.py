"""`compare` under `ckks`: counts by formula beside those of a library, its result beside plaintext, seconds beside ours.

Weights and tokens are drawn with seed 0; embeddings are drawn smaller, since a bootstrap holds from -1 to 1. Seconds are
of the CPU on one thread: primitives are measured before and after the run, and the faster ones predict it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from costmodel.calibration.ckks_times import measured
from costmodel.engine.ckks_library import Library
from costmodel.engine.ckks_machine import Run, run
from costmodel.engine.compare import SEED, drawn_tokens, drawn_weights
from costmodel.errors import UserError
from costmodel.execution import interpreter
from costmodel.execution.interpreter import Array
from costmodel.ops import OpGraph
from costmodel.protocols.ckks import CkksTestbed, Placed
from costmodel.protocols.ckks_forms import PRIMITIVES
from costmodel.protocols.ckks_placement import num_ciphertexts, place, place_by_layer
from costmodel.protocols.ckks_steps import packing_of, steps_of

SMALLER = 0.4  # of drawn embeddings
STATED_ERROR = 1e-2  # of logits: a bootstrap of the library has an error of 5e-5, which later products enlarge
SECONDS_BAR = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class CkksComparison:
    """predicted, measured: counts by primitive, and bootstraps. saved: bootstraps that a whole-graph placement saves."""

    slots: int
    levels: int
    predicted: Mapping[str, int]
    measured: Mapping[str, int]
    predicted_s: Mapping[str, float]
    measured_s: Mapping[str, float]
    saved: int
    logits_max_abs_error: float

    @property
    def seconds_error(self) -> float:
        return sum(self.predicted_s.values()) / sum(self.measured_s.values()) - 1

    @property
    def passed(self) -> bool:
        is_near = self.logits_max_abs_error <= STATED_ERROR and abs(self.seconds_error) <= SECONDS_BAR
        return self.predicted == self.measured and is_near


def compare(graph: OpGraph, library: Library, weights: Mapping[str, Array] | None = None) -> CkksComparison:
    """Run an op graph under the library; a UserError is raised for a step that it cannot run."""
    steps = steps_of(graph.nodes, packing := packing_of(graph.nodes, library.slots))
    placed = Placed(steps=tuple(steps), placement=place_by_layer(steps, library.levels))
    generator = np.random.default_rng(SEED)
    drawn, tokens = drawn_weights(graph, generator), drawn_tokens(graph, generator)
    for name in drawn:
        drawn[name] *= SMALLER if name.partition(".")[0] in ("embed", "position") else 1.0
    used = drawn if weights is None else weights
    clear = interpreter.values(graph, used, tokens)
    if library.is_bootstrapped:
        for _, step in placed.bootstrapped:
            size = float(np.abs(clear[step.node.name]).max()) if step else 1.0
            if size > 1 and step is steps[[one.node.name for one in steps].index(step.node.name)]:
                raise UserError(
                    f"a bootstrap holds from -1 to 1, but {step.node.name!r} has {size:.3g}; scale its weights."
                )
    first = measured(library)
    library.counts.clear()
    library.seconds.clear()
    job = Run(graph, used, clear, packing, library)
    result = run(steps, placed.placement, job, interpreter.inputs(graph, tokens))
    counts, seconds = +library.counts, dict(library.seconds)
    times = faster(first, measured(library, is_whole=False))
    return CkksComparison(
        slots=library.slots,
        levels=library.levels,
        predicted=placed.counts,
        measured=counts,
        predicted_s=predicted_s(placed, times),
        measured_s=seconds,
        saved=placed.counts["bootstrap"] - num_ciphertexts(steps, place(steps, library.levels)),
        logits_max_abs_error=float(np.abs(result - clear[graph.nodes[-1].name]).max()),
    )


def faster(a: CkksTestbed, b: CkksTestbed) -> CkksTestbed:
    pairs = {name: zip(a.primitives[name], b.primitives[name], strict=True) for name in PRIMITIVES}
    return replace(a, primitives={name: tuple(map(min, both)) for name, both in pairs.items()})


def predicted_s(placed: Placed, testbed: CkksTestbed) -> dict[str, float]:
    """Return the seconds of each primitive."""
    seconds = Counter[str]()
    for step, level in zip(placed.steps, placed.placement.levels, strict=True):
        for (name, used), count in step.work.items():
            seconds[name] += count * testbed.primitive_s(name, level - used)
    seconds["bootstrap"] = placed.counts["bootstrap"] * testbed.a_bootstrap_s(testbed.slots)
    return dict(+seconds)
