import fcntl
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest

from nas import provenance, storage
from nas.storage import LOCK_FILE, is_running, locked, replace_file

HOLD = """
import sys
from pathlib import Path
from nas.storage import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_is_running_while_another_process_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "LOCK_PATIENCE_S", 0.1)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert is_running(tmp_path)
        with pytest.raises(ValueError, match="is being run by another process"), locked(tmp_path):
            pass
        holder.communicate("")
    assert not is_running(tmp_path)


def test_one_who_asks_writes_nothing_and_does_not_keep_a_run_from_starting(tmp_path):
    assert not is_running(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / LOCK_FILE).touch(mode=0o444)
    assert not is_running(tmp_path)
    (tmp_path / LOCK_FILE).touch()
    with (tmp_path / LOCK_FILE).open("rb") as reader:
        fcntl.flock(reader.fileno(), fcntl.LOCK_SH)  # what `is_running` holds for a moment
        threading.Timer(0.2, fcntl.flock, (reader.fileno(), fcntl.LOCK_UN)).start()
        with locked(tmp_path):
            pass


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "meta.json"
    replace_file(path, "old")

    def torn(partial: Path, content: bytes) -> None:
        partial.write_bytes(content[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "write_through", torn)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_of_two_writers_the_last_ones_file_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "blocks.csv"
    others = [sys.executable, "-c", f"from nas.storage import *; replace_file(Path({str(path)!r}), 'theirs')"]

    def slow(partial: Path, content: bytes) -> None:
        partial.write_bytes(content[:2])
        subprocess.run(others, check=True)
        assert path.read_text() == "theirs"
        partial.write_bytes(content)

    monkeypatch.setattr(storage, "write_through", slow)
    replace_file(path, "ours")
    assert path.read_text() == "ours"
    assert list(tmp_path.iterdir()) == [path]


def test_a_source_folder_that_was_never_installed_has_versions(monkeypatch):
    def version(name: str) -> str:
        if name == "private-inference-nas":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(provenance, "version", version)
    assert provenance.versions() | {"python": ""} == {
        "private-inference-nas": "not installed",
        **dict.fromkeys(("torch", "ray", "tokenizers", "numpy"), "1.0"),
        "python": "",
    }
