"""Preparation: killed and taken up again, as far as a run needs, on a full disk, and what it says."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nas.corpus.corpus import Corpus, known_corpus, prepare, tokenizer_folder
from nas.corpus.token_files import level_of

COMMIT = 2_000

# Kills its own process at the given record of progress, if any; says how many batches it encoded.
PREPARE = f"""
import os, signal, sys
from pathlib import Path
from nas.corpus import corpus, documents, token_files, tokenizer
documents.BATCH_DOCUMENTS, token_files.COMMIT_TOKENS = 10, {COMMIT}
records, encoded, record, encode = [], [], token_files._record, tokenizer.Encoder.encode
def recorded(*args):
    record(*args)
    records.append(1)
    if len(records) == int(sys.argv[3]):
        args[1]["train"].write(b"torn by the kill")
        args[1]["train"].flush()
        os.kill(os.getpid(), signal.SIGKILL)
def counted(self, texts):
    encoded.extend(texts)
    return encode(self, texts)
token_files._record, tokenizer.Encoder.encode = recorded, counted
corpus.prepare(sys.argv[1], 300, Path(sys.argv[2]))
print(len(encoded))
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels of 5,000, 10,000, ... tokens."""
    monkeypatch.setattr("nas.corpus.documents.BATCH_DOCUMENTS", 10)
    monkeypatch.setattr("nas.corpus.token_files.LEVEL_TOKENS", 5_000)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """400 rows, some 60 tokens each."""
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    texts = (" ".join(f"{index * place % 97}" for place in range(30)) for index in range(400))
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def contents(corpus: Corpus) -> tuple:
    return corpus.tokens("train").tolist(), corpus.tokens("validation").tolist(), corpus.unigram_loss


def run(rows: Path, cache: Path, kill_at: int) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", PREPARE, str(rows), str(cache), str(kill_at)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_killed_preparation_goes_on_from_its_last_record(rows: Path, tmp_path: Path) -> None:
    assert run(rows, tmp_path / "cache", kill_at=3).returncode == -signal.SIGKILL
    (entry,) = (tmp_path / "cache").iterdir()
    done = json.loads((entry / "progress.json").read_text())
    assert 3 * COMMIT <= done["lengths"]["train"] + done["lengths"]["validation"] < 4 * COMMIT
    assert not (entry / "corpus.json").exists()
    again = run(rows, tmp_path / "cache", kill_at=0)
    assert again.returncode == 0, again.stderr
    assert int(again.stdout) == 400 - done["positions"][0][1]  # only the rest of the rows
    whole, resumed = prepare(str(rows), 300, tmp_path / "other"), prepare(str(rows), 300, tmp_path / "cache")
    assert contents(resumed) == contents(whole)
    assert resumed.fingerprint == whole.fingerprint


def test_only_what_a_run_needs_is_prepared_and_more_later(small: None, rows: Path, tmp_path: Path) -> None:
    first = prepare(str(rows), 300, tmp_path / "cache", tokens=3_000)
    assert first.num_train_tokens == 5_000
    assert Path(first.folder, "train.bin").stat().st_size < 2 * 6_000
    before = contents(first)
    second = prepare(str(rows), 300, tmp_path / "cache", tokens=5_001)
    assert second.num_train_tokens == 10_000
    assert second.tokens("train")[:5_000].tolist() == before[0]
    whole = prepare(str(rows), 300, tmp_path / "cache", tokens=10**9)
    assert 10_000 < whole.num_train_tokens < 10**6
    assert len({corpus.fingerprint for corpus in (first, second, whole)}) == 3
    assert prepare(str(rows), 300, tmp_path / "cache", tokens=3_000) == first
    assert contents(first) == before


def test_a_level_is_the_same_however_far_the_preparation_went(small: None, rows: Path, tmp_path: Path) -> None:
    prepare(str(rows), 300, tmp_path / "far", tokens=10_000)
    direct = prepare(str(rows), 300, tmp_path / "near", tokens=1)
    assert contents(prepare(str(rows), 300, tmp_path / "far", tokens=1)) == contents(direct)


def test_every_level_is_found_with_its_tokenizer(small, rows, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = [prepare(str(rows), 300, tokens=tokens) for tokens in (5_000, 10_000, 10**9)]
    assert {tokenizer_folder(corpus.fingerprint) for corpus in made} == {Path(made[0].folder)}
    assert (tokenizer_folder(made[0].fingerprint) / "tokenizer.json").is_file()
    assert [known_corpus(corpus.fingerprint) for corpus in made] == made
    assert not tokenizer_folder("0" * 16).exists()
    assert known_corpus("0" * 16) is known_corpus(None) is None


@pytest.mark.parametrize(("tokens", "levels"), [(0, 1), (1 << 23, 1), ((1 << 23) + 1, 2), (2_100_000_000, 256)])
def test_levels_double(tokens: int, levels: int) -> None:
    assert level_of(tokens) == levels << 23


def test_a_full_disk_is_one_line_and_the_next_run_goes_on(monkeypatch, rows, tmp_path) -> None:
    monkeypatch.setattr("nas.corpus.documents.BATCH_DOCUMENTS", 10)
    monkeypatch.setattr("nas.corpus.token_files.COMMIT_TOKENS", COMMIT)
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left.*goes on from what it has") as error:
        prepare(str(rows), 300, tmp_path / "cache")
    assert "\n" not in str(error.value)
    (entry,) = (tmp_path / "cache").iterdir()
    assert (entry / "progress.json").exists()
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    assert contents(prepare(str(rows), 300, tmp_path / "cache")) == contents(prepare(str(rows), 300, tmp_path / "new"))


def test_it_says_how_far_it_is_and_when_it_will_be_done(monkeypatch, small, rows, tmp_path) -> None:
    monkeypatch.setattr("nas.corpus.token_files.LOG_EVERY_S", 0.0)
    lines: list[str] = []
    prepare(str(rows), 300, tmp_path / "cache", tokens=10_000, log=lines.append)
    assert lines[0].startswith("training a tokenizer of at most 300 tokens on")
    parts = [re.fullmatch(r"preparing .*: [\d,]+ tokens, (\d+)%, ETA .*", line) for line in lines[1:]]
    shares = [int(part[1]) for part in parts if part]
    assert len(shares) == len(parts)
    assert shares == sorted(shares)
    assert len(shares) > 5
    assert shares[-1] == 100
