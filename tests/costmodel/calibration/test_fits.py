from dataclasses import replace
from functools import cache

import pytest

from costmodel import ops
from costmodel.calibration import microbenchmark
from costmodel.calibration.fits import (
    BATCH_PROBE,
    PROBE_REPEATS,
    batches_made,
    expected_seconds,
    fit_model,
    fit_testbed,
    model_plan,
)
from costmodel.calibration.microbenchmark import (
    MORE_REPEATS,
    WARM_UP,
    Series,
    Timing,
    fastest,
    measure,
    save,
    saved,
    timed_run,
    timings_file,
)
from costmodel.engine.session import Measured
from costmodel.errors import StoppedError
from costmodel.ops import Node, Op, OpGraph
from costmodel.protocols import cheetah
from costmodel.protocols.cheetah_preprocessing import BATCH, KEPT
from costmodel.protocols.derived import ComputeTestbed, extrapolation_of, op_name, seconds_of, work
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting
from search_spaces.bases import BASES
from search_spaces.lower import lower
from search_spaces.notation import parse

GRAPH = lower(parse("SM+LN+G", BASES["tiny"]).architecture, 8)
SETTING = EngineSetting()
BATCH_S, OWN_S, START_S = 0.25, 3.0, 5.0
FIXED_S, UNIT_S, LONG_S = 1e-3, 1e-6, 2.0


def of_work(op: Op, protocol: str) -> float:
    return FIXED_S + UNIT_S * sum(work(op, protocol, EngineSetting()).values())


def timed_by_work(series, protocol: str) -> Timing:
    """What a machine would take on which every kind has the same coefficients; some runs are disturbed."""
    batches = (0,) * len(series.sessions[0])
    if protocol == "cheetah":
        batches = cheetah.batches_made(series.sessions[0], EngineSetting(weights=series.weights))
    seconds = [of_work(op, protocol) + LONG_S * made for op, made in zip(series.sessions[0], batches, strict=True)]
    start = len(WARM_UP)
    disturbed = [
        s + (0.5 if index % 2 and not made else 0.0)
        for index, (s, made) in enumerate(zip(seconds[start:], batches[start:], strict=True))
    ]
    return Timing(
        kind=series.kind, start_s=START_S + sum(of_work(op, protocol) for op in WARM_UP), seconds=tuple(disturbed)
    )


@cache
def timings_by_work(protocol: str) -> list[Timing]:
    return [timed_by_work(series, protocol) for series in microbenchmark.plan(protocol)]


@cache
def fitted_by_work(protocol: str) -> ComputeTestbed:
    return fit_testbed(protocol, EngineSetting(), timings_by_work(protocol))


def test_every_series_of_the_plan_has_a_name_of_its_own():
    kinds = [series.kind for series in microbenchmark.plan("semi2k")]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.needs_engine
def test_known_coefficients_are_found_again():
    testbed = fitted_by_work("semi2k")
    for op in (ops.Relu(rows=7, features=11), ops.Linear(rows=3, in_features=50, out_features=9, bias=True)):
        assert seconds_of(op, "secret", testbed) == pytest.approx(of_work(op, "semi2k"), rel=1e-6)
    assert testbed.start_s == pytest.approx(START_S)
    assert max(measured.worst_error for measured in testbed.kinds.values()) < 1e-6


@pytest.mark.needs_engine
def test_batches_of_oblivious_transfers_are_charged_by_use():
    testbed = fitted_by_work("cheetah")
    op = ops.Relu(rows=64, features=256)
    per_ot = LONG_S / (BATCH - KEPT)
    assert seconds_of(op, "secret", testbed) == pytest.approx(
        of_work(op, "semi2k") + per_ot * cheetah.num_ots(op, EngineSetting())
    )


@pytest.mark.needs_engine
def test_a_batch_that_took_less_than_others_is_not_taken_off_its_op():
    timings = timings_by_work("cheetah")
    series = next(entry for entry in microbenchmark.plan("cheetah") if entry.kind == "Relu")
    made = cheetah.batches_made(series.sessions[0], EngineSetting())[len(WARM_UP) :]
    assert 0 < sum(made) < len(made)
    (whole,) = (timing.seconds for timing in timings if timing.kind == "Relu")
    short = tuple(s - LONG_S / 2 * batches for s, batches in zip(whole, made, strict=True))
    changed = [replace(timing, seconds=short) if timing.kind == "Relu" else timing for timing in timings]
    before = fitted_by_work("cheetah").kinds["Relu"]
    after = fit_testbed("cheetah", EngineSetting(), changed).kinds["Relu"]
    assert after.fixed_s == pytest.approx(before.fixed_s)
    assert after.worst_error < 1e-6


def test_what_was_measured_is_not_measured_again(tmp_path):
    asked: list[list[Op]] = []

    def run(runs, *, protocol, setting):
        asked.append(runs)
        return [Measured(sent_bytes=0, messages=0, seconds=1.0)] * len(runs)

    path = tmp_path / "timings.jsonl"
    first, second, *_ = measure(microbenchmark.plan("semi2k"), "semi2k", EngineSetting(), (), run)
    save(first, path)
    save(second, path)
    with path.open("a") as file:
        file.write('{"kind": "torn')
    assert saved(path) == (first, second)
    save(second, path)  # in the place of the torn line
    assert saved(path) == (first, second, second)
    asked.clear()
    everything = list(measure(microbenchmark.plan("semi2k"), "semi2k", EngineSetting(), saved(path), run))
    assert len(asked) == len(microbenchmark.plan("semi2k")) - 2
    assert everything[0] == first
    assert [timing.kind for timing in everything] == [series.kind for series in microbenchmark.plan("semi2k")]
    other = replace(first, seconds=first.seconds[:-1])  # of another plan
    assert next(iter(measure(microbenchmark.plan("semi2k"), "semi2k", EngineSetting(), (other,), run))) == first


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
    timings = [timed_by_work(series, "semi2k") for series in microbenchmark.plan("semi2k")]
    with pytest.raises(ValueError, match="must have 42 timings"):
        fit_testbed("semi2k", EngineSetting(), [replace(timings[0], seconds=(1.0,)), *timings[1:]])


def timed(series: Series, protocol: str) -> Timing:
    """Every op takes three seconds; under cheetah what batches take besides, else a tenth more at every further run."""
    made, later = [0] * series.repeats[0], 0.1
    if protocol == "cheetah":
        made, later = batches_made(series, SETTING), 0.0
    seconds = [OWN_S * (1 + later * run) + BATCH_S * num for run, num in enumerate(made)]
    return Timing(kind=series.name, start_s=START_S + 3 * OWN_S, seconds=tuple(seconds))


@pytest.mark.parametrize("protocol", list(ENGINE_PROTOCOLS))
def test_a_plan_has_every_op_of_its_graphs_once(protocol):
    plan = model_plan([GRAPH, GRAPH], protocol, SETTING)
    names = [series.name for series in plan]
    assert len(set(names)) == len(names)
    assert {node.op for node in GRAPH} <= {series.sizes[0] for series in plan}
    assert {series.repeats[0] for series in plan if series.sizes[0] != BATCH_PROBE} == {
        MORE_REPEATS[protocol == "cheetah"]
    }


def test_the_first_op_of_a_graph_is_measured_as_the_first_of_a_session():
    asked = []

    def run(ops_run, **_):
        asked.append(ops_run)
        return [Measured(sent_bytes=0, messages=0, seconds=float(len(asked)))] * len(ops_run)

    (first,) = [series for series in model_plan([GRAPH], "semi2k", SETTING) if series.cold]
    (timing,) = measure([first], "semi2k", SETTING, (), run)
    assert asked == [[*WARM_UP, GRAPH.nodes[0].op]] * 3
    assert (timing.start_s, timing.seconds) == (3.0, (1.0, 2.0, 3.0))
    assert not any(series.cold for series in model_plan([GRAPH], "cheetah", SETTING))  # batches count there
    twice = OpGraph(nodes=(*GRAPH.nodes, replace(GRAPH.nodes[0], name="again")))
    assert not any(series.cold for series in model_plan([twice], "semi2k", SETTING))


def test_the_probe_of_batches_makes_some_in_some_of_its_runs():
    made = cheetah.batches_made([*WARM_UP, *[BATCH_PROBE] * PROBE_REPEATS], SETTING)[len(WARM_UP) :]
    assert set(made) == {0, 1}


@pytest.mark.needs_engine
@pytest.mark.parametrize("protocol", list(ENGINE_PROTOCOLS))
def test_ops_take_what_was_measured_and_their_share_of_batches(protocol):
    plan = model_plan([GRAPH], protocol, SETTING)
    testbed = fit_model(plan, protocol, SETTING, [timed(series, protocol) for series in plan])
    own_s = OWN_S * (1.1 if protocol == "crypten" else 1.0)  # the second run of three, because a dealer works ahead
    assert testbed.start_s == pytest.approx(START_S - len(WARM_UP) * (own_s - OWN_S), abs=0.1)
    for op in {node.op for node in GRAPH}:
        share = BATCH_S * cheetah.num_ots(op, SETTING) / (BATCH - KEPT) if protocol == "cheetah" else 0.0
        timing = testbed.ops[op_name(op, "secret")]
        assert timing.seconds == seconds_of(op, "secret", testbed) == pytest.approx(own_s + share)
        assert timing.setup_s == pytest.approx(share)
        later = {"cheetah": 0.0, "crypten": 0.1 / 1.1}.get(protocol, 0.1 * (MORE_REPEATS[False] - 1))
        assert timing.spread == pytest.approx(later, abs=1e-9)
        assert extrapolation_of(op, "secret", testbed) == 1.0


@pytest.mark.needs_engine
def test_a_batch_that_was_slower_than_an_op_is_not_taken_off_it():
    """The first of two runs makes a batch that took 0.1 s, less than others: the second says what the op takes."""
    op = ops.LayerNorm(rows=8, features=16)
    assert cheetah.batches_made([*WARM_UP, op, op], SETTING)[len(WARM_UP) :] == (1, 0)
    plan = model_plan([OpGraph(nodes=(Node(name="a", layer=0, op=op, inputs=("tokens",)),))], "cheetah", SETTING)
    timings = [timed(series, "cheetah") for series in plan]
    quick = [replace(t, seconds=(0.13, 0.03)) if t.kind == op_name(op, "secret") else t for t in timings]
    timing = fit_model(plan, "cheetah", SETTING, quick).ops[op_name(op, "secret")]
    assert timing.seconds - timing.setup_s == pytest.approx(0.03)
    assert timing.spread == pytest.approx((0.25 - 0.1) / timing.seconds)


@pytest.mark.needs_engine
def test_with_several_threads_nobody_knows_which_runs_make_batches():
    setting = EngineSetting(threads=2)
    plan = model_plan([GRAPH], "cheetah", setting)
    assert BATCH_PROBE not in {series.sizes[0] for series in plan}
    testbed = fit_model(plan, "cheetah", setting, [timed(series, "semi2k") for series in plan])
    assert {(timing.seconds, timing.setup_s) for timing in testbed.ops.values()} == {(OWN_S, 0.0)}


def test_what_is_left_is_told_by_how_long_ops_take():
    small, large = (Series(weights="secret", sizes=(ops.Relu(rows=n, features=64),), repeats=(3,)) for n in (8, 800))
    assert expected_seconds(large, "semi2k") > expected_seconds(small, "semi2k") > 0


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch):
    path, plan = tmp_path / "timings.jsonl", model_plan([GRAPH], "semi2k", SETTING)[:3]
    asked: list[str] = []

    def measure(plan, protocol, setting, known):
        names = {timing.kind for timing in known}
        for number, series in enumerate(plan):
            if series.name not in names:
                asked.append(series.name)
            if number == 1 and not names:
                raise StoppedError("the engine failed.")
            yield timed(series, protocol)

    monkeypatch.setattr(microbenchmark, "measure", measure)
    with pytest.raises(StoppedError, match="the engine failed. Timings so far are in .*timings.jsonl; run the command"):
        timed_run(plan, "semi2k", SETTING, path)
    assert asked == [series.name for series in plan[:2]]
    asked.clear()
    assert [timing.kind for timing in timed_run(plan, "semi2k", SETTING, path)] == [series.name for series in plan]
    assert asked == [series.name for series in plan[1:]]


def test_timings_of_other_threads_are_kept_apart(tmp_path):
    one_thread, four_threads = (
        timings_file(tmp_path / "mine.yaml", "semi2k", EngineSetting(threads=n)) for n in (1, 4)
    )
    assert (one_thread.name, four_threads.name) == ("mine.semi2k.timings.jsonl", "mine.semi2k.4-threads.timings.jsonl")
    assert timings_file(tmp_path / "mine.yaml", "semi2k", SETTING, 2).name == "mine.semi2k.pass-2.timings.jsonl"


@pytest.mark.needs_engine
@pytest.mark.parametrize("threads", [1, 2])
def test_a_small_model_is_measured_and_priced(threads, tmp_path):
    """Under the engine, one op only: two warm-ups, and no more than seconds."""
    plan = model_plan([], "semi2k", EngineSetting(threads=threads))[:3]
    timings = timed_run(plan, "semi2k", EngineSetting(threads=threads), tmp_path / "timings.jsonl")
    testbed = fit_model(plan, "semi2k", EngineSetting(threads=threads), timings)
    assert testbed.threads == threads
    assert all(seconds_of(op, "secret", testbed) > 0 for op in WARM_UP)
