"""`nas.Study`: a small search through Python, watched by callbacks."""

from pathlib import Path
from typing import Any

import pytest

import nas
from costmodel.errors import InfeasibleError, StoppedError, UserError
from nas.api import Calls
from nas.search import parse

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


def test_a_study_is_priced_without_being_run() -> None:
    priced = nas.Study(budget_latency="5min").priced()
    assert priced.num_members == 1_575_325_567_577_099_522_000_000_000_000
    assert 0 < priced.num_feasible < priced.num_members
    assert "cheapest: " in "\n".join(priced.lines)


def test_a_study_takes_the_flags_of_the_command() -> None:
    given = ["--budget-latency=6.22s", "--space=tiny", "--scale=smoke", "--seq-len=32", "--seed=3", "--num-trials=2"]
    assert nas.Study(**parse(given)) == nas.Study(budget_latency="6.22s", num_trials=2, **SETTINGS)
    with pytest.raises(UserError, match="--num-trials must be at least 1"):
        nas.Study(budget_latency="5min", num_trials=0)
    with pytest.raises(InfeasibleError, match="the cheapest"):
        nas.Study(budget_latency="1ms", **SETTINGS).run()


def test_callbacks_that_are_nowhere_are_not_called(tmp_path: Path) -> None:
    seen = Seen()
    with pytest.raises(InfeasibleError):
        nas.Study(budget_latency="1ms", **SETTINGS).run(callbacks=[seen], output_dir=tmp_path / "run")
    assert seen.events == []
    assert not (tmp_path / "run").exists()


def test_a_callback_that_raises_is_dropped_with_a_warning(make_record) -> None:
    seen = Seen()
    calls = Calls([Broken(), seen])
    with pytest.warns(UserWarning, match=r"callback Broken raised KeyError in trial_ended \('t0-s0-a0'\)"):
        calls.trial_ended(make_record(0))
    calls.trial_ended(make_record(1))
    assert [event for event, _ in seen.events] == ["ended", "ended"]


def test_a_run_that_cannot_be_read_hides_no_other_error(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="callback Seen raised UserError in run_started"):
        Calls([Seen()]).started(tmp_path)


@pytest.mark.usefixtures("without_ray")
def test_a_search_tells_its_callbacks_and_goes_on(source_files: str, tmp_path: Path, capfd) -> None:
    study = nas.Study(
        budget_latency="6.22s", data=source_files, num_trials=2, num_looks=0, finalist_seeds=0, **SETTINGS
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


def test_callbacks_are_told_of_the_end_of_a_run_that_stops(source_files: str, tmp_path: Path, monkeypatch) -> None:
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
