import math

import pytest

from nas.run import ledger


@pytest.fixture
def path(tmp_path, make_record):
    """A ledger of one record."""
    ledger.append(tmp_path / ledger.FILE_NAME, make_record(0))
    return tmp_path / ledger.FILE_NAME


def test_a_ledger_is_read_back_and_its_csv_has_a_row_per_record(path, tmp_path, make_record):
    ledger.append(path, *(written := [make_record(0, event="started", status="running"), make_record(1, flags=("x",))]))
    assert ledger.read(path) == (make_record(0), *written)
    ledger.write_table(tmp_path / "trials.csv", ledger.table([make_record(0), make_record(1)]))
    lines = (tmp_path / "trials.csv").read_text().splitlines()
    assert len(lines) == 3
    assert "versions" not in lines[0]


def test_a_torn_last_line_is_dropped_with_a_warning_and_cut_off(path, make_record):
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match="torn last line"):
        assert ledger.recover(path) == (make_record(0),)
    assert path.read_bytes() == whole
    ledger.append(path, make_record(1))
    assert ledger.read(path) == (make_record(0), make_record(1))


def test_another_schema_and_damage_before_the_last_line_are_errors(path):
    path.write_text(path.read_text().replace(f'"schema_version":{ledger.SCHEMA_VERSION}', '"schema_version":7'))
    with pytest.raises(ValueError, match=f"`schema_version` must be {ledger.SCHEMA_VERSION}, but got 7"):
        ledger.read(path)
    path.write_bytes(b'{"torn": \n' + path.read_bytes())
    with pytest.raises(ValueError, match="line 1 must be a JSON record"):
        ledger.read(path)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_number_is_never_written(make_record, bad):
    with pytest.raises(ValueError, match="`perplexity` of trial .* must be finite"):
        make_record(0, perplexity=bad)


def test_only_the_last_word_on_a_trial_counts_and_only_completed_ones_are_ranked(make_record):
    records = [
        make_record(1, status="diverged", val_loss=None, perplexity=None, reason="loss is NaN"),
        make_record(0, event="started", status="running"),
        make_record(0),
        make_record(2, status="paused"),
    ]
    assert [record.index for record in ledger.finished(records)] == [0, 1, 2]
    assert [record.index for record in ledger.completed(records)] == [0]


def test_what_may_not_be_on_disk_is_taken_back(path, make_record, monkeypatch):
    before = path.read_bytes()

    def fsync(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        ledger.append(path, make_record(1))
    assert path.read_bytes() == before
