from dataclasses import replace

import pytest

from costmodel import ops
from costmodel.calibration.fit_compute import fit_testbed
from costmodel.calibration.microbenchmark import WARM_UP, Timing, fastest, measure, plan, save, saved
from costmodel.engine.spu import Measured
from costmodel.ops import Op
from costmodel.protocols import cheetah
from costmodel.protocols.cheetah_preprocessing import BATCH, KEPT
from costmodel.protocols.derived import (
    seconds_of,
    work,
)
from costmodel.protocols.primitives import EngineSetting

START_S, FIXED_S, UNIT_S, BATCH_S = 5.0, 1e-3, 1e-6, 2.0


def of_work(op: Op, protocol: str) -> float:
    return FIXED_S + UNIT_S * sum(work(op, protocol, EngineSetting()).values())


def timed(series, protocol: str) -> Timing:
    """What a machine would take on which every kind has the same coefficients; some runs are disturbed."""
    batches = (0,) * len(series.sessions[0])
    if protocol == "cheetah":
        batches = cheetah.batches_made(series.sessions[0], EngineSetting(weights=series.weights))
    seconds = [of_work(op, protocol) + BATCH_S * made for op, made in zip(series.sessions[0], batches, strict=True)]
    start = len(WARM_UP)
    disturbed = [
        s + (0.5 if index % 2 and not made else 0.0)
        for index, (s, made) in enumerate(zip(seconds[start:], batches[start:], strict=True))
    ]
    return Timing(
        kind=series.kind, start_s=START_S + sum(of_work(op, protocol) for op in WARM_UP), seconds=tuple(disturbed)
    )


def test_every_series_of_the_plan_has_a_name_of_its_own():
    kinds = [series.kind for series in plan("semi2k")]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.needs_engine
def test_known_coefficients_are_found_again():
    testbed = fit_testbed("semi2k", EngineSetting(), [timed(series, "semi2k") for series in plan("semi2k")])
    for op in (ops.Relu(rows=7, features=11), ops.Linear(rows=3, in_features=50, out_features=9, bias=True)):
        assert seconds_of(op, "secret", testbed) == pytest.approx(of_work(op, "semi2k"), rel=1e-6)
    assert testbed.start_s == pytest.approx(START_S)
    assert max(measured.worst_error for measured in testbed.kinds.values()) < 1e-6


@pytest.mark.needs_engine
def test_batches_of_oblivious_transfers_are_charged_by_use():
    testbed = fit_testbed("cheetah", EngineSetting(), [timed(series, "cheetah") for series in plan("cheetah")])
    op = ops.Relu(rows=64, features=256)
    per_ot = BATCH_S / (BATCH - KEPT)
    assert seconds_of(op, "secret", testbed) == pytest.approx(
        of_work(op, "semi2k") + per_ot * cheetah.num_ots(op, EngineSetting())
    )


@pytest.mark.needs_engine
def test_a_batch_that_took_less_than_others_is_not_taken_off_its_op():
    timings = [timed(series, "cheetah") for series in plan("cheetah")]
    series = next(entry for entry in plan("cheetah") if entry.kind == "Relu")
    made = cheetah.batches_made(series.sessions[0], EngineSetting())[len(WARM_UP) :]
    assert 0 < sum(made) < len(made)
    short = [s - BATCH_S / 2 * batches for s, batches in zip(timed(series, "cheetah").seconds, made, strict=True)]
    changed = [replace(timing, seconds=tuple(short)) if timing.kind == "Relu" else timing for timing in timings]
    before, after = (
        fit_testbed("cheetah", EngineSetting(), measurements).kinds["Relu"] for measurements in (timings, changed)
    )
    assert after.fixed_s == pytest.approx(before.fixed_s)
    assert after.worst_error < 1e-6


def test_what_was_measured_is_not_measured_again(tmp_path):
    asked: list[list[Op]] = []

    def run(runs, *, protocol, setting):
        asked.append(runs)
        return [Measured(sent_bytes=0, messages=0, seconds=1.0)] * len(runs)

    path = tmp_path / "timings.jsonl"
    first, second, *_ = measure(plan("semi2k"), "semi2k", EngineSetting(), (), run)
    save(first, path)
    save(second, path)
    with path.open("a") as file:
        file.write('{"kind": "torn')
    assert saved(path) == (first, second)
    save(second, path)  # in the place of the torn line
    assert saved(path) == (first, second, second)
    asked.clear()
    everything = list(measure(plan("semi2k"), "semi2k", EngineSetting(), saved(path), run))
    assert len(asked) == len(plan("semi2k")) - 2
    assert everything[0] == first
    assert [timing.kind for timing in everything] == [series.kind for series in plan("semi2k")]
    other = replace(first, seconds=first.seconds[:-1])  # of another plan
    assert next(iter(measure(plan("semi2k"), "semi2k", EngineSetting(), (other,), run))) == first


def test_of_two_passes_the_faster_runs_count():
    timings = [Timing(kind="Relu", start_s=2.0, seconds=(0.1, 0.4)), Timing(kind="Silu", start_s=1.0, seconds=(0.3,))]
    other = [Timing(kind="Relu", start_s=1.5, seconds=(0.2, 0.3)), Timing(kind="Silu", start_s=1.2, seconds=(0.2,))]
    assert fastest([timings, other]) == [
        Timing(kind="Relu", start_s=1.5, seconds=(0.1, 0.3)),
        Timing(kind="Silu", start_s=1.0, seconds=(0.2,)),
    ]
    assert fastest([timings]) == timings


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "Relu"}\n', "line 1 lacks the key 'start_s'"),
        ('{"kind": "torn{"kind"\n', "timings.jsonl, line 1 must be JSON .delete the line"),
    ],
)
def test_timings_that_are_none_are_refused(line, message, tmp_path):
    path = tmp_path / "timings.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        saved(path)


def test_a_plan_that_changed_asks_for_new_timings():
    timings = [timed(series, "semi2k") for series in plan("semi2k")]
    with pytest.raises(ValueError, match="must have 42 timings"):
        fit_testbed("semi2k", EngineSetting(), [replace(timings[0], seconds=(1.0,)), *timings[1:]])
