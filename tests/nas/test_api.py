"""`nas.load_run`: a run that is on disk, through Python."""

import csv
import shutil
from pathlib import Path

import pytest

import nas
from costmodel.errors import UserError
from nas.run import ledger
from nas.run.front import front
from nas.run.tables import write_tables
from tests.imports import loaded_by

EARLIER = Path(__file__).parent / "run" / "stored"


@pytest.fixture
def run(tmp_path: Path) -> nas.Run:
    return nas.load_run(shutil.copytree(EARLIER / "semi2k", tmp_path / "run"))


def test_a_run_is_what_its_folder_says(run: nas.Run) -> None:
    assert run.records == ledger.read(run.folder / ledger.FILE_NAME)
    assert run.front == front(run.records, run.config.budget)
    assert {member.arch_id for member in run.front} <= {member.arch_id for member in run.members}
    assert run.summary.completed == len(run.members) == 3
    assert run.summary.best in run.front
    assert repr(run) == f"Run(folder={run.folder!r})"


@pytest.mark.parametrize(("of", "file"), [("front", "pareto.csv"), ("trials", "trials.csv")])
def test_tables_are_those_of_the_files(run: nas.Run, of, file) -> None:
    pandas = pytest.importorskip("pandas")
    write_tables(run)
    written = list(csv.DictReader((run.folder / file).read_text().splitlines()))
    table = run.to_pandas(of)
    assert isinstance(table, pandas.DataFrame)
    assert list(table.columns) == list(written[0])
    assert [float(row["latency_s"]) for row in written] == list(table.latency_s)
    assert [row["notation"] for row in written] == list(table.notation)


def test_an_empty_front_is_an_empty_table(run: nas.Run) -> None:
    pytest.importorskip("pandas")
    (run.folder / ledger.FILE_NAME).write_text("")
    table = nas.load_run(run.folder).to_pandas()
    assert (len(table), "perplexity" in table.columns) == (0, True)


def test_figures_and_page_are_drawn(run: nas.Run, tmp_path: Path) -> None:
    drawn = run.plot()
    assert {path for path in drawn if path.stat().st_size > 0} >= {run.folder / "plots" / "pareto.png"}
    assert run.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_other_prices_leave_the_run_as_it_is(run: nas.Run) -> None:
    before = run.records
    wan, loopback = (run.reprice(protocol="semi2k", network=name) for name in ("wan", "loopback"))
    assert {member.trial_id for member in wan.what_if.repriced} == {member.trial_id for member in run.members}
    for far, near in zip(wan.what_if.repriced, loopback.what_if.repriced, strict=True):
        assert far.latency_s > near.latency_s
    assert nas.load_run(run.folder).records == before


def test_what_may_change_when_a_run_goes_on(run: nas.Run) -> None:
    assert run.resumed(num_trials=9, time_budget="1min").num_trials == 9
    assert run.resumed() == run.config
    with pytest.raises(UserError, match=r"--space of a resumed run must stay 'tiny', but got 'gpt2-small'"):
        run.resumed(space="gpt2-small")
    with pytest.raises(UserError, match=r"--num-trials of a resumed run can only be raised from 3, but got 2"):
        run.resumed(num_trials=2)
    with pytest.raises(UserError, match=r"a resumed run may change --budget-latency, .*, but got --trials"):
        run.resumed(trials=9)


def test_importing_the_package_loads_nothing() -> None:
    assert loaded_by("import nas; nas.__all__; dir(nas)") == set()


def test_a_run_is_read_without_torch(run: nas.Run) -> None:
    code = f"import nas; run = nas.load_run({str(run.folder)!r}); run.front, run.table()"
    assert not loaded_by(code) & {"torch", "ray", "jax", "matplotlib", "pandas", "transformers"}


def test_every_name_of_the_package_is_there() -> None:
    assert {name: getattr(nas, name).__name__ for name in nas.__all__} == {name: name for name in nas.__all__}
    with pytest.raises(AttributeError, match="has no attribute 'Study_'"):
        _ = nas.Study_
