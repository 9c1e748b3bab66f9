"""A testbed of one model: every distinct op of it, measured at its full size, so that no price is extrapolated.

Each op runs in an engine session of its own, after the warm-up, several times; the least time counts. Under cheetah
the batches of oblivious transfers (OTs) that a run made are taken off, and the share that the op uses is added, which
is made ahead. Under semi2k and aby3 nothing is, or it is part of every call; of cheetah with several threads it is not
known.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

from costmodel import ops
from costmodel.calibration.fit_compute import (
    LEAST_S,
    batch_seconds,
    batches_made,
    counts_batches,
    new_testbed,
    own_and_setup_s,
    paired,
)
from costmodel.calibration.microbenchmark import MORE_REPEATS, WARM_UP, Series, Timing
from costmodel.calibration.timed_run import timed_run
from costmodel.errors import UserError
from costmodel.ops import OpGraph
from costmodel.protocols.compute_testbed import ComputeTestbed, OpSeconds, load_compute, op_name, seconds_of
from costmodel.protocols.derived import TESTBEDS
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting

SESSION_S = 5.0  # that a session of the engine takes to start, about
# What a batch of OTs takes shows in runs that make one now and then, of an op that takes little longer than a batch.
BATCH_PROBE, PROBE_REPEATS = ops.Relu(rows=128, features=256), 8


def model_plan(graphs: Iterable[OpGraph], protocol: str, setting: EngineSetting) -> tuple[Series, ...]:
    """A series per distinct op of some graphs, and before them those that tell starting and OTs apart."""
    repeats = MORE_REPEATS[ENGINE_PROTOCOLS[protocol].is_slow]
    probe = {BATCH_PROBE: PROBE_REPEATS} if counts_batches(protocol, setting) else {}
    wanted = dict.fromkeys(WARM_UP, repeats) | dict.fromkeys((n.op for graph in graphs for n in graph), repeats) | probe
    return tuple(Series(weights=setting.weights, sizes=(op,), repeats=(times,)) for op, times in wanted.items())


def measured_model(graphs: Iterable[OpGraph], protocol: str, setting: EngineSetting, timings: Path) -> ComputeTestbed:
    """A testbed of the ops of some graphs; timings so far are kept in a file. Raises as `timed_run`."""
    plan = model_plan(graphs, protocol, setting)
    measured = timed_run(plan, protocol, setting, timings, lambda series: expected_seconds(series, protocol))
    return fit_model(plan, protocol, setting, measured)


def fit_model(
    plan: Sequence[Series], protocol: str, setting: EngineSetting, timings: Sequence[Timing]
) -> ComputeTestbed:
    """The seconds of every op of a plan. Raises UserError if one has no timing, or one of another number of runs."""
    pairs = paired(plan, timings)
    probes = [pair for pair in pairs if pair[0].sizes[0] == BATCH_PROBE]
    batch_s = batch_seconds(probes, setting) if counts_batches(protocol, setting) else 0.0
    seconds = {series.sizes[0]: _seconds(series, timing, protocol, setting, batch_s) for series, timing in pairs}
    testbed = new_testbed(
        protocol, setting, ops={op_name(op, setting.weights): op_seconds for op, op_seconds in seconds.items()}
    )
    own_s = sum(seconds[op].seconds for op in WARM_UP)
    return replace(testbed, start_s=max(0.0, median(timing.start_s for timing in timings) - own_s))


def _seconds(series: Series, timing: Timing, protocol: str, setting: EngineSetting, batch_s: float) -> OpSeconds:
    made, own_s, setup_s = [0] * len(timing.seconds), max(min(timing.seconds), LEAST_S), 0.0
    if counts_batches(protocol, setting):
        made = batches_made(series, setting)
        own_s, setup_s = own_and_setup_s(series.sizes[0], made, timing.seconds, setting, batch_s)
    runs, fewest = zip(made, timing.seconds, strict=True), min(made)
    alike = [seconds - batch_s * num for num, seconds in runs if num == fewest or made.count(fewest) == 1]
    spread_s = max(abs(seconds - own_s) for seconds in alike)
    return OpSeconds(
        seconds=own_s + setup_s, setup_s=setup_s, spread=spread_s / (own_s + setup_s), num_runs=len(timing.seconds)
    )


def expected_seconds(series: Series, protocol: str) -> float:
    """How long a series may take, by the committed testbed, for the sake of telling how much is left."""
    testbed = load_compute(TESTBEDS / f"{protocol}.yaml")
    expected_s = SESSION_S + testbed.start_s
    for op in series.runs:
        with suppress(UserError):
            expected_s += seconds_of(op, series.weights, testbed)
    return expected_s
