"""Makes a testbed of one model: each distinct op is measured at its full size, so that no cost is extrapolated.

Each op runs several times in its own engine session, after a warm-up, and the fastest run counts, or the median where a
dealer works ahead. A model's first op gets a session per run, since a model runs it before memory of its size is in
use. Under cheetah on one thread, the batches of oblivious transfers (OTs) of a run are replaced by the share that the
op uses.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
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
    typical_seconds,
)
from costmodel.calibration.microbenchmark import MORE_REPEATS, WARM_UP, Series, Timing
from costmodel.calibration.timed_run import timed_run
from costmodel.config.files import load_file
from costmodel.errors import UserError
from costmodel.ops import OpGraph
from costmodel.protocols.derived import TESTBEDS, ComputeTestbed, OpSeconds, op_name, seconds_of
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting

SESSION_S = 5.0  # approximate start-up time of an engine session
# The time of a batch of OTs is measured with a short op, of which only some runs make a batch.
BATCH_PROBE, PROBE_REPEATS = ops.Relu(rows=128, features=256), 8


def model_plan(graphs: Iterable[OpGraph], protocol: str, setting: EngineSetting) -> tuple[Series, ...]:
    """Return a series for each distinct op of the graphs, preceded by series that measure start-up and OT batches.

    The first op of a graph is measured in new sessions (`cold`), because in use it runs at the start of a session;
    but not if the graph repeats it, or if OT batches are counted.
    """
    repeats = MORE_REPEATS[ENGINE_PROTOCOLS[protocol].is_slow]
    probe = {BATCH_PROBE: PROBE_REPEATS} if counts_batches(protocol, setting) else {}
    ops_of = [[node.op for node in graph] for graph in graphs]
    wanted = dict.fromkeys((*WARM_UP, *chain.from_iterable(ops_of)), repeats) | probe
    cold = {first for first, *others in ops_of if first not in others and not probe}
    return tuple(
        Series(weights=setting.weights, sizes=(op,), repeats=(times,), cold=op in cold) for op, times in wanted.items()
    )


def measured_model(graphs: Iterable[OpGraph], protocol: str, setting: EngineSetting, timings: Path) -> ComputeTestbed:
    """Measure the ops of the graphs and return their testbed; timings are saved and errors raised as by `timed_run`."""
    plan = model_plan(graphs, protocol, setting)
    measured = timed_run(plan, protocol, setting, timings, lambda series: expected_seconds(series, protocol))
    return fit_model(plan, protocol, setting, measured)


def fit_model(
    plan: Sequence[Series], protocol: str, setting: EngineSetting, timings: Sequence[Timing]
) -> ComputeTestbed:
    """Return the testbed of a plan's ops; a UserError is raised if one has no timing, or not one for each run."""
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
    made, own_s, setup_s = [0] * len(timing.seconds), max(typical_seconds(protocol, timing.seconds), LEAST_S), 0.0
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
    """Estimate the seconds of a series from the committed testbed, to report the time left."""
    testbed = load_file(ComputeTestbed, TESTBEDS / f"{protocol}.yaml")
    expected_s = len(series.sessions) * (SESSION_S + testbed.start_s)
    for op in chain.from_iterable(series.sessions):
        with suppress(UserError):
            expected_s += seconds_of(op, series.weights, testbed)
    return expected_s
