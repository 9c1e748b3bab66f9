import pytest

from costmodel.config import cli
from costmodel.config.bugs import (
    MAX_CHARS,
    BugError,
    bugs_reported,
    described,
    report_bug,
    require_writable_cache,
    traceback_kept,
)
from costmodel.errors import StoppedError, UserError


def fail(error):
    raise error


def test_a_bug_in_a_folder_is_written_there_and_told_with_its_remedy(tmp_path):
    for number in (1, 2):
        with pytest.raises(BugError) as info, bugs_reported(tmp_path, "go on"):
            fail(TypeError(f"number {number}"))
    path = tmp_path / "traceback.txt"
    assert str(info.value) == f"unexpected TypeError: number 2; this is a bug: the traceback is in {path}; go on"
    assert isinstance(info.value.__cause__, TypeError)
    assert path.read_text().count("Traceback (most recent call last)") == 2  # the first is kept


@pytest.mark.parametrize(
    "error", [UserError("no"), StoppedError("no"), OSError("no"), KeyboardInterrupt(), MemoryError()]
)
def test_what_is_no_bug_passes(tmp_path, error):
    with pytest.raises(type(error)), bugs_reported(tmp_path):
        fail(error)
    assert list(tmp_path.iterdir()) == []


def test_a_bug_is_reported_once(tmp_path, capsys):
    def action():
        with bugs_reported(tmp_path / "outer"), bugs_reported(tmp_path / "inner"):
            fail(TypeError("x"))

    assert cli.guarded(action) == 1
    assert str(tmp_path / "inner" / "traceback.txt") in capsys.readouterr().err
    assert not (tmp_path / "outer").exists()
    with pytest.raises(BugError) as info:
        cli.guarded(action, debug=True)
    assert isinstance(info.value.__cause__, TypeError)


@pytest.mark.parametrize("command", [["--prompt", "my secret\n"], ["--prompt=my secret\n"]])
def test_a_report_has_no_prompt_and_only_its_owner_reads_it(tmp_path, monkeypatch, command):
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "nas.private", *command, "--new-tokens", "2"])
    (path := tmp_path / "traceback.txt").touch(mode=0o644)
    kept = traceback_kept(TypeError("no 'my secret\\n' here"), tmp_path)
    assert kept == f"the traceback is in {path}"
    assert path.stat().st_mode & 0o777 == 0o600
    report = path.read_text()
    assert "secret" not in report
    assert "--new-tokens 2" in report
    assert "no '...' here" in report
    traceback_kept(TypeError("x"), tmp_path, "other.txt")
    assert (tmp_path / "other.txt").stat().st_mode & 0o777 == 0o600


def test_without_a_home_the_traceback_goes_to_stderr_and_a_long_text_is_cut(monkeypatch, capsys):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pathlib.Path.home", lambda: fail(RuntimeError("no home")))
    assert report_bug(TypeError("x")).endswith("the traceback could not be written")
    assert "TypeError: x" in capsys.readouterr().err
    assert len(described(KeyError("x" * 10 * MAX_CHARS))) < MAX_CHARS + 50


def test_a_cache_that_cannot_be_written_to_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    require_writable_cache()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"but: Permission denied; name one .* in the environment variable XDG_CACHE_H"):
        require_writable_cache()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"but: Not a directory; name one"):
        require_writable_cache()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("pathlib.Path.home", lambda: fail(RuntimeError("no home")))
    with pytest.raises(UserError, match="this user has no home; name one"):
        require_writable_cache()
