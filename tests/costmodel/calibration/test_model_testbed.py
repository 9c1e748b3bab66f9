from dataclasses import replace

import pytest

from costmodel import ops
from costmodel.calibration import timed_run as timed_run_module
from costmodel.calibration.fit_compute import batches_made
from costmodel.calibration.microbenchmark import MORE_REPEATS, WARM_UP, Series, Timing, measure
from costmodel.calibration.model_testbed import (
    BATCH_PROBE,
    PROBE_REPEATS,
    expected_seconds,
    fit_model,
    model_plan,
)
from costmodel.calibration.timed_run import timed_run, timings_file
from costmodel.engine.spu import Measured
from costmodel.errors import StoppedError
from costmodel.ops import Node, OpGraph
from costmodel.protocols import cheetah
from costmodel.protocols.cheetah_preprocessing import BATCH, KEPT
from costmodel.protocols.derived import extrapolation_of, op_name, seconds_of
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting
from search_spaces.bases import BASES
from search_spaces.lower import lower
from search_spaces.notation import parse

GRAPH = lower(parse("SM+LN+G", BASES["tiny"]).architecture, 8)
SETTING = EngineSetting()
BATCH_S, OWN_S, START_S = 0.25, 3.0, 5.0


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

    monkeypatch.setattr(timed_run_module, "measure", measure)
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
