from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from costmodel.calibration.model_testbed import fit_model, model_plan
from costmodel.engine.spu import Measured, Pass
from costmodel.errors import StoppedError
from costmodel.ops import OpGraph
from costmodel.protocols.compute_testbed import ComputeTestbed
from costmodel.protocols.primitives import EngineSetting
from experiments import seconds
from experiments.__main__ import settings_of
from experiments.seconds import TOTAL, Line, misses
from tests.costmodel.calibration.test_model_testbed import timed

SMALL = settings_of("seconds-small")
ONE = replace(SMALL, cases=SMALL.cases[:1])
GOOD = Line(
    kind=TOTAL, measured_s=10.0, spread=0.02, model_s=10.9, bar=0.1, committed_s=12.0, low_s=9.0, high_s=15.0
)  # fmt: skip


@pytest.fixture(autouse=True)
def of_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Ops take three seconds each by themselves, and in whole runs 3, 3.3, ... seconds; every whole run is counted."""
    runs: list[int] = []

    def measured_model(graphs, protocol: str, setting: EngineSetting, timings: Path) -> ComputeTestbed:
        plan = model_plan(graphs, protocol, setting)
        return fit_model(plan, protocol, setting, [timed(series, protocol) for series in plan])

    def passes(job, link, conditions):
        runs.append(len(job.graph.nodes))
        cost = Measured(sent_bytes=0, messages=0, seconds=3.0 * (1 + 0.1 * (len(runs) - 1)))
        return (Pass(seconds=cost.seconds * len(job.graph.nodes), by_op=(cost,) * len(job.graph.nodes)),), None

    monkeypatch.setattr(seconds, "check_engine", lambda protocol: None)
    monkeypatch.setattr(seconds, "measured_model", measured_model)
    monkeypatch.setattr(seconds, "passes", passes)
    monkeypatch.setattr(seconds, "RUNS", tmp_path)
    return runs


@pytest.mark.needs_engine
def test_whole_runs_meet_both_predictions(of_no_engine):
    """Starting takes five seconds by itself, and nothing in the whole runs: 60 of 65 are the fastest run's."""
    console = Console(record=True, width=200)
    seconds.run("small", ONE, console)
    lines, loads = seconds.measured_case(ONE, ONE.cases[0], "small", console)
    total = lines[-1]
    assert total.kind == TOTAL
    assert total.measured_s == 3.0 * of_no_engine[0]
    assert total.model_s == pytest.approx(total.measured_s + 5.0, abs=0.01)
    assert total.spread == pytest.approx(0.1)
    assert {line.kind: line.error for line in lines}["Gelu"] == pytest.approx(0.0, abs=1e-6)
    assert sum(line.committed_s for line in lines[:-1]) == pytest.approx(total.committed_s)
    assert len(loads) == 2
    assert "inside the committed testbeds' range" in console.export_text()


@pytest.mark.needs_engine
def test_an_experiment_that_was_stopped_goes_on(of_no_engine, monkeypatch):
    real = vars(seconds)["passes"]

    def failing(job, link, conditions):
        if len(of_no_engine) == 1:
            raise StoppedError("the engine failed.")
        return real(job, link, conditions)

    monkeypatch.setattr(seconds, "passes", failing)
    with pytest.raises(
        StoppedError, match="the engine failed. What was measured so far is in .*; run the command again"
    ):
        seconds.run("small", ONE, Console(quiet=True))
    assert len(of_no_engine) == 1
    monkeypatch.setattr(seconds, "passes", real)
    seconds.run("small", ONE, Console(quiet=True))
    assert len(of_no_engine) == 2


@pytest.mark.needs_engine
def test_a_missed_bar_is_said_and_stops():
    tight = replace(ONE, cases=(replace(ONE.cases[0], total_bar=0.01),), committed_bar=0.01, least_inside=1.0)
    with pytest.raises(
        StoppedError,
        match=r"3 bars .*: semi2k total \+10% of 10%; semi2k committed .* of 1%; .* inside the range, not 100%",
    ):
        seconds.run("small", tight, Console(quiet=True))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"model_s": 11.5}, ["total +15% of 10%"]),
        ({"model_s": 8.0, "committed_s": 14.0}, ["total -20% of 10%", "committed +40% of 30%"]),
        ({"kind": "Gelu", "committed_s": 14.0}, []),
        ({"kind": "Add", "model_s": 20.0, "bar": None}, []),
    ],
)
def test_bars(changes, told):
    assert misses(settings_of("seconds"), [GOOD._replace(**changes)]) == told


def test_a_file_that_holds_no_runs_is_refused(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"by_kind": {"Add": 1.0}}\n')
    with pytest.raises(ValueError, match=r"runs.jsonl lacks the key 'load'"):
        seconds.whole_runs(OpGraph(nodes=()), "semi2k", 1, path, Console(quiet=True))
