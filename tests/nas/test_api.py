import csv
import shutil
from pathlib import Path
from typing import Any

import pytest

import costmodel
import nas
from costmodel.errors import InfeasibleError, StoppedError, UserError
from nas import plot
from nas.api import Calls
from nas.run import ledger
from nas.run.members import front
from nas.run.tables import write_tables
from nas.search import parse

EARLIER = Path(__file__).parent / "run" / "stored"


@pytest.fixture
def run(tmp_path: Path) -> nas.Run:
    return nas.load_run(shutil.copytree(EARLIER / "semi2k", tmp_path / "run"))


def test_a_run_is_what_its_folder_says(run):
    assert run.records == ledger.read(run.folder / ledger.FILE_NAME)
    assert run.front == front(run.records, run.config.budget)
    assert {member.arch_id for member in run.front} <= {member.arch_id for member in run.members}
    assert run.summary.completed == len(run.members) == 3
    assert run.summary.best in run.front
    assert repr(run) == f"Run(folder={run.folder!r})"


@pytest.mark.parametrize(("of", "file"), [("front", "pareto.csv"), ("trials", "trials.csv")])
def test_tables_are_those_of_the_files(run, of, file):
    pandas = pytest.importorskip("pandas")
    write_tables(run)
    written = list(csv.DictReader((run.folder / file).read_text().splitlines()))
    table = run.to_pandas(of)
    assert isinstance(table, pandas.DataFrame)
    assert list(table.columns) == list(written[0])
    assert [float(row["latency_s"]) for row in written] == list(table.latency_s)
    assert [row["notation"] for row in written] == list(table.notation)


def test_an_empty_front_is_an_empty_table(run):
    pytest.importorskip("pandas")
    (run.folder / ledger.FILE_NAME).write_text("")
    table = nas.load_run(run.folder).to_pandas()
    assert (len(table), "perplexity" in table.columns) == (0, True)


def test_figures_and_page_are_drawn(run, tmp_path):
    assert run.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    plots = run.folder / "plots"
    for draw in (run.plot, lambda: plot.plot(str(run.folder))):
        shutil.rmtree(plots, ignore_errors=True)
        draw()
        assert min((plots / f"pareto.{kind}").stat().st_size for kind in ("png", "svg")) > 0


def test_other_prices_leave_the_run_as_it_is(run):
    before = run.records
    wan, loopback = (run.reprice(protocol="semi2k", network=name) for name in ("wan", "loopback"))
    assert {member.trial_id for member in wan.what_if.repriced} == {member.trial_id for member in run.members}
    for far, near in zip(wan.what_if.repriced, loopback.what_if.repriced, strict=True):
        assert far.latency_s > near.latency_s
    assert nas.load_run(run.folder).records == before


def test_what_may_change_when_a_run_goes_on(run):
    assert (run.resumed(num_trials=9, time_budget="1min").num_trials, run.resumed()) == (9, run.config)
    with pytest.raises(UserError, match=r"--space of a resumed run must stay 'tiny', but got 'gpt2-small'"):
        run.resumed(space="gpt2-small")
    with pytest.raises(UserError, match=r"--num-trials of a resumed run can only be raised from 3, but got 2"):
        run.resumed(num_trials=2)
    with pytest.raises(UserError, match=r"a resumed run may change --budget-latency, .*, but got --trials"):
        run.resumed(trials=9)
    with pytest.raises(UserError, match=r"a resumed run may change --budget-latency, .*, but got --budget"):
        run.resumed(budget=run.config.budget)


@pytest.mark.parametrize("package", [costmodel, nas])
def test_every_name_of_the_package_is_there(package):
    assert [getattr(package, name).__name__ for name in package.__all__] == [*package.__all__]
    with pytest.raises(AttributeError, match="has no attribute 'Study_'"):
        _ = package.Study_


SETTINGS: dict[str, Any] = {"space": "tiny", "scale": "smoke", "seq_len": 32, "seed": 3}


class Seen(nas.Callback):
    """Notes what it is told of."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def run_started(self, run: nas.Run) -> None:
        self.events.append(("started", len(run.records)))

    def trial_ended(self, record: nas.Record) -> None:
        self.events.append(("ended", record))

    def run_ended(self, run: nas.Run) -> None:
        self.events.append(("over", run.front))


class Broken(nas.Callback):
    """Raises at the first trial."""

    def trial_ended(self, record: nas.Record) -> None:
        raise KeyError(record.trial_id)


def test_a_study_takes_the_flags_of_the_command_and_is_priced_without_being_run(tmp_path):
    given = ["--budget-latency=6.22s", "--space=tiny", "--scale=smoke", "--seq-len=32", "--seed=3", "--num-trials=2"]
    assert nas.Study(**parse(given)) == nas.Study(budget_latency="6.22s", num_trials=2, **SETTINGS)
    with pytest.raises(UserError, match="--num-trials must be at least 1"):
        nas.Study(budget_latency="5min", num_trials=0)
    seen = Seen()
    with pytest.raises(InfeasibleError, match="the cheapest"):
        nas.Study(budget_latency="1ms", **SETTINGS).run(callbacks=[seen], output_dir=tmp_path / "run")
    assert seen.events == []
    assert not (tmp_path / "run").exists()
    priced = nas.Study(budget_latency="5min").priced()
    assert priced.num_members == 1_575_325_567_577_099_522_000_000_000_000
    assert 0 < priced.num_feasible < priced.num_members
    assert "cheapest: " in "\n".join(priced.lines)


def test_a_callback_that_raises_is_dropped_with_a_warning_and_hides_no_other_error(make_record, tmp_path):
    seen = Seen()
    calls = Calls([Broken(), seen])
    with pytest.warns(UserWarning, match=r"callback Broken raised KeyError in trial_ended \('t0-s0-a0'\)"):
        calls.trial_ended(make_record(0))
    calls.trial_ended(make_record(1))
    assert [event for event, _ in seen.events] == ["ended", "ended"]
    with pytest.warns(UserWarning, match="callback Seen raised UserError in run_started"):
        Calls([Seen()]).started(tmp_path)


@pytest.mark.usefixtures("without_ray")
def test_a_search_tells_its_callbacks_and_goes_on(source_files, tmp_path, capfd):
    study = nas.Study(
        budget_latency="6.22s", data=source_files, num_trials=2, num_proxy_evals=0, finalist_seeds=0, **SETTINGS
    )
    first, second = Seen(), Seen()
    run = study.run(callbacks=[first], output_dir=tmp_path / "run")
    assert capfd.readouterr().out == ""
    assert first.events[0] == ("started", 0)
    ended = [record for event, record in first.events if event == "ended"]
    finished = [record for record in run.records if record.event == "finished"]
    assert sorted(ended, key=lambda record: record.index) == sorted(finished, key=lambda record: record.index)
    assert first.events[-1] == ("over", run.front)
    assert len(run.front) > 0
    more = run.resume(num_trials=3, callbacks=[second])
    assert [event for event, _ in second.events] == ["started", "ended", "over"]
    assert second.events[0] == ("started", len(run.records))
    assert more.summary.ended == run.summary.ended + 1
    with pytest.raises(UserError, match="already holds a run"):
        study.run(output_dir=run.folder)
    (run.folder / "run.yaml").unlink()
    with pytest.raises(UserError, match="has a run without its run.yaml; choose another"):
        study.run(output_dir=run.folder)


def test_callbacks_are_told_of_the_end_of_a_run_that_stops(source_files, tmp_path, monkeypatch):
    def broken(*args: object, **settings: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nas.study.ray_tune.run_trials", broken)
    study, seen = nas.Study(budget_latency="6.22s", data=source_files, num_trials=2, **SETTINGS), Seen()
    with pytest.raises(StoppedError, match="No space left on device"):
        study.run(callbacks=[seen], output_dir=tmp_path / "run")
    assert seen.events == [("started", 0), ("over", ())]


def test_an_output_folder_that_cannot_be_used_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("nas.api.price_study", lambda *args: pytest.fail("priced"))
    study = nas.Study(budget_latency="5min", **SETTINGS)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "in" / "it"):
        with pytest.raises(UserError, match="must be a folder we can write to: Not a directory"):
            study.run(output_dir=folder)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UserError, match="must be a folder we can write to: Permission denied"):
        study.run(output_dir=tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
