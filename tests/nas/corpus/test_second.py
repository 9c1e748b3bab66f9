"""The second corpus: other text, in the first one's tokens, all of which validates."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from costmodel.errors import UserError
from nas.corpus import second as module
from nas.corpus.corpus import Corpus, prepare
from nas.corpus.near_duplicates import to_keep, window_hashes
from nas.corpus.ngram_baseline import ngram_baseline
from nas.corpus.second import require_sequences, second_corpus, second_source
from nas.corpus.sequences import held_out_targets


def write(folder: Path, name: str, count: int) -> Path:
    folder.mkdir()
    for index in range(count):
        lines = (f"{name}_{index}_{line} = {line * index}\n" for line in range(30))
        (folder / f"{name}_{index}.py").write_text("".join(lines))
    return folder


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return prepare(str(write(tmp_path / "first", "value", 60)), 300)


def made(folder: Path, first: Corpus, of_parent=None) -> Corpus:
    return second_corpus(str(folder), second_source(str(folder)), first, of_parent)


def test_all_of_it_validates_in_the_tokens_of_the_first(first: Corpus, tmp_path: Path) -> None:
    folder = write(tmp_path / "other", "other", 5)
    second = made(folder, first)
    assert [name for name, _ in second.held_out.documents] == [f"other_{index}.py" for index in range(5)]
    tokenizer = Tokenizer.from_file(str(Path(first.folder) / "tokenizer.json"))
    text = tokenizer.decode(second.tokens("validation").tolist())
    assert text == "".join((folder / f"other_{index}.py").read_text() for index in range(5))
    assert (second.tokenizer, second.vocab_size) == (first.tokenizer, first.vocab_size)
    assert second.fingerprint != first.fingerprint
    assert made(folder, first) == second  # from the cache
    assert held_out_targets(second, 16, 10**9).shares == pytest.approx(np.full(5, 0.2), abs=0.01)
    require_sequences(second, 16)


def test_n_grams_of_the_first_are_looked_up_in_it(first: Corpus, tmp_path: Path) -> None:
    second = made(write(tmp_path / "other", "other", 5), first)
    here, there = (
        ngram_baseline(first, second=other_corpus, seq_len=16, validation_tokens=10**6)
        for other_corpus in (None, second)
    )
    assert here.tokens == there.tokens
    assert here.losses[2] < there.losses[2]
    assert ngram_baseline(first, second=second, seq_len=16, validation_tokens=10**6) == there


def test_a_file_of_the_first_is_refused_in_one_line(first: Corpus, tmp_path: Path) -> None:
    folder = write(tmp_path / "other", "other", 5)
    (folder / "moved.py").write_text((tmp_path / "first" / "value_7.py").read_text())
    with pytest.raises(
        UserError, match="must be other text than --data .* but shares 1 files with them, moved.py"
    ) as error:
        made(folder, first)
    assert "\n" not in str(error.value)
    (folder / "moved.py").unlink()
    of_parent = to_keep(window_hashes((folder / "other_3.py").read_text()))
    with pytest.raises(UserError, match="what the parent was trained on, but shares 1 files with them, other_3.py"):
        made(folder, first, of_parent)


def test_one_too_small_for_n_grams_is_refused_in_one_line(first: Corpus, tmp_path: Path) -> None:
    second = made(write(tmp_path / "other", "other", 1), first)
    with pytest.raises(UserError, match="must hold more than 1000 tokens for an n-gram baseline, but has") as error:
        require_sequences(second, 1000)
    assert "\n" not in str(error.value)


def test_dependencies_are_the_same_files_every_time(first: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKAGES", ("rich", "nowhere-installed", "networkx"))
    monkeypatch.setattr(module, "FILES_OF_EACH", 2)
    source = second_source("dependencies")
    names = [document.name for document in source.documents]
    assert [name.split("/")[0] for name in names] == ["rich", "rich", "networkx", "networkx"]
    assert not any("test" in name for name in names)
    assert second_source("dependencies") == source
    assert second_corpus("dependencies", source, first, None).num_validation_tokens > 1_000
