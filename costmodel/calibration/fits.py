"""Fit testbeds: from timings to seconds per kind of op, or to the seconds of every op of one model.

The fastest repeat of each op counts. Where a dealer works ahead, the median counts, since during the last repeats the
dealer has nothing left to do, and the parties have the cores for themselves. Under cheetah some runs also make batches
of oblivious transfers (OTs) for later ops; with one thread, only the repeats with the fewest batches count, and the
seconds of a batch are estimated from the others and charged to ops by the number of OTs that each op uses.

In the testbed of one model, each distinct op is measured at its full size, so that no cost is extrapolated: several
times in a separate engine session, after a warm-up. A model's first op usually has a session for each run (see
`model_plan`), since a model runs it before memory of its size is in use. The memory of an engine's processes is fitted
on runs of whole models.
"""

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from costmodel import ops
from costmodel.calibration.microbenchmark import MORE_REPEATS, WARM_UP, Series, Timing, plan, timed_run
from costmodel.config.files import load_file
from costmodel.engine import spu
from costmodel.engine.children import own_children
from costmodel.engine.compare import SEED, drawn_caches, drawn_tokens, drawn_weights
from costmodel.errors import StoppedError, UserError
from costmodel.execution.memory import FEATURES, MemoryFit, MemoryTestbed, features
from costmodel.ops import Op, OpGraph
from costmodel.protocols import cheetah
from costmodel.protocols.cheetah_preprocessing import BATCH, KEPT
from costmodel.protocols.derived import (
    POOL,
    TESTBEDS,
    ComputeTestbed,
    KindSeconds,
    OpSeconds,
    fitted_kind,
    op_name,
    seconds_of,
    work,
)
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting

FIXED = "fixed"
LEAST_S = 1e-6  # lower bound of a run's seconds after its batches are subtracted
SESSION_S = 5.0  # approximate start-up time of an engine session
# The time of a batch of OTs is measured with a short op, of which only some runs make a batch.
BATCH_PROBE, PROBE_REPEATS = ops.Relu(rows=128, features=256), 8


def fit_testbed(protocol: str, setting: EngineSetting, timings: Sequence[Timing]) -> ComputeTestbed:
    """Return the testbed with fitted seconds of every kind in `microbenchmark.plan`, from the timings of that plan.

    Matrix products whose weights have the same holder are fitted together. A token embedding that looks tokens up and
    then multiplies is fitted after them, and takes the seconds of its product from their fit. Errors are those of
    `paired`.
    """
    pairs = paired(plan(protocol), timings)
    batch_s = batch_seconds(pairs, setting) if counts_batches(protocol, setting) else 0.0
    groups: dict[str, list[tuple[Op, float]]] = {}
    for series, timing in pairs:
        group = groups.setdefault(fitted_kind(series.sizes[0], series.weights), [])
        group += zip(series.sizes, map(sum, own_and_setup_s(protocol, series, timing, setting, batch_s)), strict=True)
    fits: dict[str, KindSeconds] = {}
    for name in sorted(groups, key=lambda name: not name.startswith(POOL)):
        works = [work(op, protocol, setting) for op, _ in groups[name]]
        pool = fits.get(f"{POOL}.{name.rpartition('.')[2]}")
        known = {} if pool is None or "products" not in works[0] else pool.per_unit_s
        fits[name] = _fit(works, [seconds for _, seconds in groups[name]], known)
    testbed = _testbed(protocol, setting, kinds={name: fits[name] for name in groups})
    warm_up_s = sum(seconds_of(op, "secret", testbed) for op in WARM_UP)
    return replace(testbed, start_s=max(0.0, median(timing.start_s for timing in timings) - warm_up_s))


def processor() -> str:
    """Return the name of this machine's processor; its architecture, such as x86_64, if the system tells no name."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _testbed(
    protocol: str,
    setting: EngineSetting,
    *,
    kinds: dict[str, KindSeconds] | None = None,
    ops: dict[str, OpSeconds] | None = None,
) -> ComputeTestbed:
    """Return a testbed of this machine and engine, dated today, without start-up seconds."""
    threads = "one thread" if setting.threads == 1 else f"{setting.threads} threads"
    return ComputeTestbed(
        protocol=protocol,
        engine=setting.formulas_of,
        threads=setting.threads,
        machine=f"{processor()}, {len(os.sched_getaffinity(0))} cores, a process of {threads} per party",
        measured_on=datetime.now(UTC).date().isoformat(),
        ring_bits=setting.ring_bits,
        fraction_bits=setting.fraction_bits,
        start_s=0.0,
        kinds=kinds or {},
        ops=ops or {},
    )


def paired(plan: Sequence[Series], timings: Sequence[Timing]) -> list[tuple[Series, Timing]]:
    """Return each series with the timing of its name.

    A UserError is raised if a series has no timing, or its timing has more or fewer seconds than the series has runs.
    """
    by_name = {timing.kind: timing for timing in timings}
    for series in plan:
        runs = sum(series.repeats)
        if series.name not in by_name or len(by_name[series.name].seconds) != runs:
            raise UserError(
                f"kind {series.name} must have {runs} timings, one for each run of the plan; measure it again."
            )
    return [(series, by_name[series.name]) for series in plan]


def counts_batches(protocol: str, setting: EngineSetting) -> bool:
    """Return whether runs make OT batches that the formulas count: only under cheetah with one thread per party."""
    return protocol == "cheetah" and setting.threads == 1


def typical_seconds(protocol: str, repeats: Sequence[float]) -> float:
    """Return the least of the seconds of an op's repeats or, under a protocol whose dealer works ahead, the median."""
    return median(repeats) if ENGINE_PROTOCOLS[protocol].deals_ahead else min(repeats)


def own_and_setup_s(
    protocol: str, series: Series, timing: Timing, setting: EngineSetting, batch_s: float
) -> list[tuple[float, float]]:
    """Return, for each size of a series, the seconds of the op and the seconds of its share of OT batches.

    If `counts_batches`, a batch takes `batch_s` seconds, which the first number excludes. Only runs with the fewest
    batches count, since a batch takes longer than most ops. Otherwise the second number is 0.
    """
    repeats = series.by_size(timing.seconds)
    if not counts_batches(protocol, setting):
        return [(max(typical_seconds(protocol, seconds), LEAST_S), 0.0) for seconds in repeats]
    held, found = replace(setting, weights=series.weights), []
    for op, made, seconds in zip(series.sizes, series.by_size(batches_made(series, setting)), repeats, strict=True):
        fewest, least_s = min(zip(made, seconds, strict=True))
        setup_s = batch_s * (cheetah.num_ots(op, held) / (BATCH - KEPT))
        found.append((max(least_s - batch_s * fewest, LEAST_S), setup_s))
    return found


def batch_seconds(pairs: Sequence[tuple[Series, Timing]], setting: EngineSetting) -> float:
    """Return the seconds of a batch of OTs, or 0 if no run made more batches than another run of the same op.

    Each run with more batches than the fewest of its op has a number of seconds per extra batch, both counted from the
    op's fastest run with the fewest batches. The result is the median of these numbers, at least 0.
    """
    longer: list[float] = []
    for series, timing in pairs:
        made = batches_made(series, setting)
        for seconds, batches in zip(series.by_size(timing.seconds), series.by_size(made), strict=True):
            least = min(zip(batches, seconds, strict=True))
            longer += [(s - least[1]) / (n - least[0]) for s, n in zip(seconds, batches, strict=True) if n > least[0]]
    return max(0.0, median(longer)) if longer else 0.0


def batches_made(series: Series, setting: EngineSetting) -> list[int]:
    """Return the number of OT batches that each run of a series makes; runs of the warm-up are left out."""
    held = replace(setting, weights=series.weights)
    return [made for ops in series.sessions for made in cheetah.batches_made(ops, held)[len(WARM_UP) :]]


def _fit(works: Sequence[Mapping[str, int]], seconds: Sequence[float], known: Mapping[str, float]) -> KindSeconds:
    """Minimise the mean relative error with coefficients >= 0, and again without each op, for its held-out error.

    known: Coefficients from the fit of another kind, which are kept.
    """
    from costmodel.protocols.linear_fit import fit  # imported here, as costs do not need scipy

    def error(values: Mapping[str, float], index: int) -> float:
        return abs(sum(values[unit] * count for unit, count in rows[index].items()) / seconds[index] - 1)

    rows = [{FIXED: 1, **units} for units in works]
    values = fit(rows, seconds, known)
    held_out = []
    for index in range(len(rows)):
        others = [*rows[:index], *rows[index + 1 :]], [*seconds[:index], *seconds[index + 1 :]]
        held_out.append(error(fit(*others, known), index))
    return KindSeconds(
        fixed_s=values[FIXED],
        per_unit_s={unit: values[unit] for unit in works[0]},
        greatest={unit: max(units[unit] for units in works) for unit in works[0]},
        num_points=len(rows),
        worst_error=max(error(values, index) for index in range(len(rows))),
        held_out_error=max(held_out),
    )


def model_plan(graphs: Iterable[OpGraph], protocol: str, setting: EngineSetting) -> tuple[Series, ...]:
    """Return a series for each distinct op of the warm-up and the graphs, and for `BATCH_PROBE` if `counts_batches`.

    The series of a graph's first op is `cold`, because a model runs this op at the start of a session; but it is not if
    the graph repeats the op, or if `counts_batches`.
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
    """Measure the graphs' ops by `timed_run`, which keeps them in the file `timings`, and return their testbed."""
    plan = model_plan(graphs, protocol, setting)
    measured = timed_run(plan, protocol, setting, timings, lambda series: expected_seconds(series, protocol))
    return fit_model(plan, protocol, setting, measured)


def fit_model(
    plan: Sequence[Series], protocol: str, setting: EngineSetting, timings: Sequence[Timing]
) -> ComputeTestbed:
    """Return the testbed of the ops of a `model_plan`, from the timings of that plan; errors are those of `paired`."""
    pairs = paired(plan, timings)
    probes = [pair for pair in pairs if pair[0].sizes[0] == BATCH_PROBE]
    batch_s = batch_seconds(probes, setting) if counts_batches(protocol, setting) else 0.0
    seconds = {series.sizes[0]: _seconds(series, timing, protocol, setting, batch_s) for series, timing in pairs}
    testbed = _testbed(
        protocol, setting, ops={op_name(op, setting.weights): op_seconds for op, op_seconds in seconds.items()}
    )
    own_s = sum(seconds[op].seconds for op in WARM_UP)
    return replace(testbed, start_s=max(0.0, median(timing.start_s for timing in timings) - own_s))


def _seconds(series: Series, timing: Timing, protocol: str, setting: EngineSetting, batch_s: float) -> OpSeconds:
    ((own_s, setup_s),) = own_and_setup_s(protocol, series, timing, setting, batch_s)
    made = batches_made(series, setting) if counts_batches(protocol, setting) else [0] * len(timing.seconds)
    runs, fewest = zip(made, timing.seconds, strict=True), min(made)
    alike = [seconds - batch_s * num for num, seconds in runs if num == fewest or made.count(fewest) == 1]
    spread_s = max(abs(seconds - own_s) for seconds in alike)
    return OpSeconds(
        seconds=own_s + setup_s, setup_s=setup_s, spread=spread_s / (own_s + setup_s), num_runs=len(timing.seconds)
    )


def expected_seconds(series: Series, protocol: str) -> float:
    """Return the expected seconds of a series, by the package's testbed; ops that the testbed lacks count as 0."""
    testbed = load_file(ComputeTestbed, TESTBEDS / f"{protocol}.yaml")
    expected_s = len(series.sessions) * (SESSION_S + testbed.start_s)
    for op in chain.from_iterable(series.sessions):
        with suppress(UserError):
            expected_s += seconds_of(op, series.weights, testbed)
    return expected_s


def measured_memory(graphs: Sequence[OpGraph], protocol: str, report: Callable[[str], None]) -> MemoryTestbed:
    """Run every graph once, call `report` with a line on each, and return the fit of the processes' peak memory.

    A UserError is raised if the engine is not installed; a StoppedError if the engine fails or the system does not tell
    peak memory.
    """
    peaks = []
    for index, graph in enumerate(graphs, start=1):
        with own_children():  # a reused process would still hold the memory of earlier runs
            peaks.append(_peaks(graph, protocol))
        sizes = ", ".join(f"{peak / 1e6:.0f} MB" for peak in peaks[-1])
        report(f"{protocol}: {index} of {len(graphs)} models, {sizes}")
    return fit_memory(
        protocol, [features(graph, protocol, ENGINE_PROTOCOLS[protocol].setting()) for graph in graphs], peaks
    )


def _peaks(graph: OpGraph, protocol: str) -> tuple[int, ...]:
    """Return the peak bytes of every party, the first one first; a StoppedError is raised if they are not known."""
    generator = np.random.default_rng(SEED)
    weights = drawn_weights(graph, generator)
    tokens, caches = drawn_tokens(graph, generator), drawn_caches(graph, generator)
    setting = ENGINE_PROTOCOLS[protocol].setting()
    run = spu.run(graph, weights, tokens, caches, protocol=protocol, setting=setting)
    peaks = tuple(peak for peak in run.peak_bytes if peak is not None)
    if len(peaks) < len(run.peak_bytes):
        raise StoppedError("this system does not tell a process its peak memory; calibrate it on Linux.")
    return peaks


def fit_memory(protocol: str, counts: Sequence[dict[Any, int]], peaks: Sequence[tuple[int, ...]]) -> MemoryTestbed:
    """Return the fit of peak memory to runs of models.

    counts: by run, the bytes of each feature (`memory.features`). peaks: by run, each party's bytes, the client first.
    """
    setting = ENGINE_PROTOCOLS[protocol].setting()
    return MemoryTestbed(
        protocol=protocol,
        engine=setting.formulas_of,
        ring_bits=setting.ring_bits,
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        measured_on=datetime.now(UTC).date().isoformat(),
        num_points=len(peaks),
        greatest={name: max(count[name] for count in counts) for name in FEATURES},
        client=_memory_fit(counts, [of_all[0] for of_all in peaks]),
        party=_memory_fit(counts, [max(of_all[1:]) for of_all in peaks]),
    )


def _memory_fit(counts: Sequence[dict[Any, int]], peaks: Sequence[int]) -> MemoryFit:
    from costmodel.protocols.linear_fit import least_squares  # imported here, as costs do not need scipy

    table = np.array([[count[name] for name in FEATURES] for count in counts], dtype=float)
    shares = table / np.array(peaks, dtype=float)[:, None]  # of each measured peak
    whole = least_squares(shares)
    apart = [shares[index] @ least_squares(np.delete(shares, index, axis=0)) - 1 for index in range(len(peaks))]
    return MemoryFit(
        coefficients={name: float(f"{value:.4g}") for name, value in zip(FEATURES, whole, strict=True)},
        worst_error=round(float(np.abs(shares @ whole - 1).max()), 4),
        held_out_error=round(float(np.abs(apart).max()), 4),
    )
