"""Times of CKKS primitives under a library on this machine, by level, as a testbed.

Seconds are of the CPU, on one thread, so that other programs of a busy machine hardly count.
"""

import platform
from dataclasses import asdict

import numpy as np
import yaml

from costmodel.engine.ckks_library import PACKAGE, VERSION, Library
from costmodel.protocols.ckks import CkksTestbed
from costmodel.protocols.ckks_forms import PRIMITIVES, Primitive

NUM_LEVELS, NUM_RUNS = 5, 2
CPU_ERROR = 0.25  # the bar of the engine check, on one block


def measured(library: Library, *, is_whole: bool = True) -> CkksTestbed:
    """Return a testbed: the fastest of two runs of each primitive at levels from 1 to the highest.

    is_whole: whether a bootstrap is measured too, which takes minutes.
    """
    generator = np.random.default_rng(0)
    slots = generator.uniform(-1, 1, library.slots)
    levels = sorted({round(level) for level in np.linspace(1, library.levels, NUM_LEVELS)})
    primitives: dict[Primitive, list[float]] = {name: [] for name in PRIMITIVES}
    for level in levels:
        times = [_one_of_each(library, slots, level) for _ in range(NUM_RUNS)]
        for name in PRIMITIVES:
            primitives[name].append(float(f"{min(one[name] for one in times):.4g}"))
    bootstrap_s = 0.0
    if library.is_bootstrapped and is_whole:
        before = library.seconds["bootstrap"]
        library.bootstrapped(library.encrypted(slots, 0))
        bootstrap_s = float(f"{library.seconds['bootstrap'] - before:.4g}")
    return CkksTestbed(
        protocol="ckks",
        machine=f"{platform.machine()}, one thread; seconds of the CPU",
        source=f"measured under {PACKAGE} {VERSION}",
        slots=library.slots,
        levels=library.levels,
        at_levels=tuple(levels),
        primitives={name: tuple(seconds) for name, seconds in primitives.items()},
        at_slots=(library.slots,),
        bootstrap_s=(bootstrap_s,),
        error=CPU_ERROR,
    )


def _one_of_each(library: Library, slots: np.ndarray, level: int) -> dict[str, float]:
    before = dict(library.seconds)
    value = library.rotation(library.encrypted(slots, level), 1)
    library.rescaled(library.plain_product(value, slots))
    library.relinearised(library.product(value, value))
    return {name: library.seconds[name] - before.get(name, 0.0) for name in PRIMITIVES}


def dump(testbed: CkksTestbed) -> str:
    return yaml.safe_dump(asdict(testbed), sort_keys=False, width=120, default_flow_style=None)
