"""The fit of a compute testbed: it takes timings of a microbenchmark and returns seconds per kind of op.

The fastest repeat of each op counts; where a dealer works ahead, the median, since during the last repeats the dealer
has nothing left to do, and the parties have the cores for themselves. Under cheetah some runs also make a batch of
oblivious transfers (OTs) for later ops; such runs count only if every repeat made one. The seconds of a batch are
estimated from them, and charged to ops by the OTs that each uses.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from costmodel.calibration.microbenchmark import WARM_UP, Series, Timing, plan
from costmodel.errors import UserError
from costmodel.ops import Op
from costmodel.protocols import cheetah
from costmodel.protocols.cheetah_preprocessing import BATCH, KEPT
from costmodel.protocols.derived import (
    POOL,
    ComputeTestbed,
    KindSeconds,
    OpSeconds,
    fitted_kind,
    seconds_of,
    work,
)
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting

FIXED = "fixed"
LEAST_S = 1e-6  # lower bound of a run's seconds after its batches are subtracted


def fit_testbed(protocol: str, setting: EngineSetting, timings: Sequence[Timing]) -> ComputeTestbed:
    """Return the testbed with the coefficients of every kind of the plan; all matrix products are fitted together.

    A UserError is raised if a kind has no timing, or not one for each run.
    """
    pairs = paired(plan(protocol), timings)
    batch_s = batch_seconds(pairs, setting) if counts_batches(protocol, setting) else 0.0
    groups: dict[str, list[tuple[Op, float]]] = {}
    for series, timing in pairs:
        seconds = seconds_by_size(protocol, series, timing, setting, batch_s)
        groups.setdefault(fitted_kind(series.sizes[0], series.weights), []).extend(
            zip(series.sizes, seconds, strict=True)
        )
    testbed = new_testbed(protocol, setting, kinds=fit_kinds(groups, protocol, setting))
    warm_up_s = sum(seconds_of(op, "secret", testbed) for op in WARM_UP)
    return replace(testbed, start_s=max(0.0, median(timing.start_s for timing in timings) - warm_up_s))


def new_testbed(
    protocol: str,
    setting: EngineSetting,
    *,
    kinds: Mapping[str, KindSeconds] | None = None,
    ops: Mapping[str, OpSeconds] | None = None,
) -> ComputeTestbed:
    """Return a testbed of this machine and engine, dated today, without start-up seconds."""
    threads = "one thread" if setting.threads == 1 else f"{setting.threads} threads"
    return ComputeTestbed(
        protocol=protocol,
        engine=setting.formulas_of,
        threads=setting.threads,
        machine=f"{_processor()}, {len(os.sched_getaffinity(0))} cores, a process of {threads} per party",
        measured_on=datetime.now(UTC).date().isoformat(),
        ring_bits=setting.ring_bits,
        fraction_bits=setting.fraction_bits,
        start_s=0.0,
        kinds=dict(kinds or {}),
        ops=dict(ops or {}),
    )


def fit_kinds(
    groups: Mapping[str, Sequence[tuple[Op, float]]], protocol: str, setting: EngineSetting
) -> dict[str, KindSeconds]:
    """Return the fit of every kind, on ops and their seconds.

    A lookup compares tokens before a matrix product, whose seconds come from the fit of matrix products.
    """
    kinds: dict[str, KindSeconds] = {}
    for name in sorted(groups, key=lambda name: not name.startswith(POOL)):
        works = [work(op, protocol, setting) for op, _ in groups[name]]
        pool = kinds.get(f"{POOL}.{name.rpartition('.')[2]}")
        known = {} if pool is None or "products" not in works[0] else pool.per_unit_s
        kinds[name] = _fit(works, [seconds for _, seconds in groups[name]], known)
    return {name: kinds[name] for name in groups}


def paired(plan: Iterable[Series], timings: Sequence[Timing]) -> list[tuple[Series, Timing]]:
    """Pair every series with its timing; a UserError is raised if one has no timing, or not one for each run."""
    by_name = {timing.kind: timing for timing in timings}
    for series in plan:
        runs = sum(series.repeats[: len(series.sizes)])
        if series.name not in by_name or len(by_name[series.name].seconds) != runs:
            raise UserError(
                f"kind {series.name} must have {runs} timings, one for each run of the plan; measure it again."
            )
    return [(series, by_name[series.name]) for series in plan]


def counts_batches(protocol: str, setting: EngineSetting) -> bool:
    """Whether it is known which runs make batches of OTs; with several threads it is not: each thread makes its own."""
    return protocol == "cheetah" and setting.threads == 1


def typical_seconds(protocol: str, repeats: Sequence[float]) -> float:
    """Return the seconds of an op from those of its repeats."""
    return median(repeats) if ENGINE_PROTOCOLS[protocol].deals_ahead else min(repeats)


def seconds_by_size(
    protocol: str, series: Series, timing: Timing, setting: EngineSetting, batch_s: float
) -> list[float]:
    """Return one time per size. Under cheetah each includes its share of OT batches, `batch_s` seconds each."""
    repeats = series.by_size(timing.seconds)
    if not counts_batches(protocol, setting):
        return [typical_seconds(protocol, seconds) for seconds in repeats]
    held = replace(setting, weights=series.weights)
    runs = zip(series.sizes, series.by_size(batches_made(series, setting)), repeats, strict=True)
    return [sum(own_and_setup_s(op, batches, seconds, held, batch_s)) for op, batches, seconds in runs]


def own_and_setup_s(
    op: Op, made: Sequence[int], seconds: Sequence[float], setting: EngineSetting, batch_s: float
) -> tuple[float, float]:
    """Return the seconds of an op without OT batches, and the seconds of its share of them.

    `made` and `seconds` are by run. The runs with the fewest batches count, since a batch takes longer than most ops.
    """
    fewest, least_s = min(zip(made, seconds, strict=True))
    return max(least_s - batch_s * fewest, LEAST_S), batch_s * (cheetah.num_ots(op, setting) / (BATCH - KEPT))


def batch_seconds(pairs: Sequence[tuple[Series, Timing]], setting: EngineSetting) -> float:
    """Return the seconds of a batch: how much longer a run took than one of the same op that made fewer batches."""
    longer: list[float] = []
    for series, timing in pairs:
        made = batches_made(series, setting)
        for seconds, batches in zip(series.by_size(timing.seconds), series.by_size(made), strict=True):
            least = min(zip(batches, seconds, strict=True))
            longer += [(s - least[1]) / (n - least[0]) for s, n in zip(seconds, batches, strict=True) if n > least[0]]
    return max(0.0, median(longer)) if longer else 0.0


def batches_made(series: Series, setting: EngineSetting) -> list[int]:
    """Return the batches of OTs that every run of a series makes, after the warm-up."""
    held = replace(setting, weights=series.weights)
    return [made for ops in series.sessions for made in cheetah.batches_made(ops, held)[len(WARM_UP) :]]


def _fit(works: Sequence[Mapping[str, int]], seconds: Sequence[float], known: Mapping[str, float]) -> KindSeconds:
    """Minimise the mean relative error with coefficients >= 0, also without each op; `known` are of other kinds."""
    rows = [{FIXED: 1, **units} for units in works]
    values = _coefficients(rows, seconds, known)
    held_out = [
        _error(
            _coefficients([*rows[:i], *rows[i + 1 :]], [*seconds[:i], *seconds[i + 1 :]], known), rows[i], seconds[i]
        )
        for i in range(len(rows))
    ]
    return KindSeconds(
        fixed_s=values[FIXED],
        per_unit_s={unit: values[unit] for unit in works[0]},
        greatest={unit: max(units[unit] for units in works) for unit in works[0]},
        num_points=len(rows),
        worst_error=max(_error(values, row, measured) for row, measured in zip(rows, seconds, strict=True)),
        held_out_error=max(held_out),
    )


def _coefficients(
    rows: Sequence[Mapping[str, int]], seconds: Sequence[float], known: Mapping[str, float]
) -> dict[str, float]:
    from costmodel.protocols.linear_fit import fit  # imported here, as costs do not need scipy

    return fit(rows, seconds, worst=math.inf, fixed=known)


def _error(values: Mapping[str, float], row: Mapping[str, int], seconds: float) -> float:
    return abs(sum(values[unit] * count for unit, count in row.items()) / seconds - 1)


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "processor not known"
