"""Corpora: split without leakage, cached once, whole or prepared again."""

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from nas.corpus.corpus import Corpus, open_corpus, prepare, require_chunks
from nas.corpus.documents import by_hash, texts
from nas.corpus.sequences import num_sequences
from nas.corpus.sources import open_source
from nas.corpus.tokenizer import END_OF_TEXT
from nas.recipe.recipe import SCALES
from nas.training.batches import train_batch, validation_batches
from tests.nas.corpus.source_files import write_files


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return write_files(tmp_path_factory.mktemp("data") / "files")


@pytest.fixture(scope="module")
def corpus(files: Path, tmp_path_factory) -> Corpus:
    return prepare(str(files), 300, tmp_path_factory.mktemp("cache"))


def test_tokens_decode_to_the_documents(files: Path, corpus: Corpus) -> None:
    tokenizer = Tokenizer.from_file(str(Path(corpus.folder) / "tokenizer.json"))
    for split in ("train", "validation"):
        tokens = corpus.tokens(split)
        assert tokens.dtype == np.uint16
        text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        assert text == "".join(f"{document}{END_OF_TEXT}" for document in texts(open_source(str(files)), split))


def test_the_unigram_loss_is_that_of_smoothed_frequencies(corpus: Corpus) -> None:
    counts = Counter(corpus.tokens("train").tolist())
    total = corpus.num_train_tokens + corpus.vocab_size
    losses = [-math.log((counts[token] + 1) / total) for token in corpus.tokens("validation").tolist()]
    assert corpus.unigram_loss == pytest.approx(sum(losses) / len(losses))


def test_the_tokenizer_never_saw_the_validation_split(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "files")
    before = prepare(str(folder), 300, tmp_path / "cache")
    held_out = next(path for path in folder.iterdir() if by_hash(path.name) == "validation")
    held_out.write_text("zyxw vuts " * 5_000)
    after = prepare(str(folder), 300, tmp_path / "cache")
    assert after.tokenizer == before.tokenizer
    assert after.fingerprint != before.fingerprint


def test_a_second_preparation_is_the_first(files: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nas.corpus.corpus.extend", lambda *args: pytest.fail("the cache was not used"))
    assert prepare(str(files), 300, Path(corpus.folder).parent) == corpus


def test_text_and_vocabulary_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "files")
    first = prepare(str(folder), 300, tmp_path / "cache").fingerprint
    assert prepare(str(folder), 310, tmp_path / "cache").fingerprint != first
    with pytest.MonkeyPatch.context() as patch:  # another version may learn other merges
        patch.setattr("nas.corpus.corpus.tokenizers_version", "0.0.1")
        assert prepare(str(folder), 300, tmp_path / "cache").fingerprint != first
    (folder / "module_0.py").write_text("changed = True\n")
    assert prepare(str(folder), 300, tmp_path / "cache").fingerprint != first


@pytest.mark.parametrize("damage", ["shorter", "garbage", "record"])
def test_a_torn_entry_is_prepared_again(tmp_path: Path, damage: str) -> None:
    folder = write_files(tmp_path / "files")
    first = prepare(str(folder), 300, tmp_path / "cache")
    tokens = first.tokens("train").tolist()
    train, facts = Path(first.folder) / "train.bin", Path(first.folder) / "corpus.json"
    if damage == "shorter":
        train.write_bytes(train.read_bytes()[:-3])
    elif damage == "record":
        facts.unlink()
        (Path(first.folder) / "progress.json").write_text('{"lengths": 3}')
    else:
        facts.write_bytes(b"\xff{")
    with pytest.warns(UserWarning, match="preparing the corpus anew"):
        again = prepare(str(folder), 300, tmp_path / "cache")
    assert again == first
    assert again.tokens("train").tolist() == tokens
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.fingerprint]


def test_processes_preparing_at_once_agree(files: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from nas.corpus.corpus import prepare\n"
        "print(prepare(sys.argv[1], 300, Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(files), str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=60)[0].strip() for process in processes}
    (entry,) = tmp_path.iterdir()
    assert printed == {str(open_corpus(entry))}


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("nowhere", None, "data must be stdlib, codeparrot, languini, NAME:FOLDER for a local copy of these, a folder"),
        ("image.png", "x", "data must be stdlib"),
        ("rows.jsonl", "{", "line 1 must be a JSON object, but cannot be parsed"),
        ("rows.jsonl", '{"text": ' + "9" * 5_000 + "}", "line 1 must be a JSON object, but cannot be parsed: Exceeds"),
        ("rows.jsonl", r'{"text": "\ud800"}', "line 1 must hold Unicode text, but has half a surrogate pair"),
        ("rows.jsonl", '{"title": "x"}', "with a text in"),
        ("empty.txt", "", "is empty"),
        ("short.txt", "a\n", "is empty"),
        ("empty.jsonl", "", "is empty"),
        ("rows.jsonl", "[" * 100_000, "line 1 must be a JSON object, but cannot be parsed: maximum recursion"),
        ("rows.parquet", "", "rows.parquet must be a whole parquet file"),
        ("rows.parquet", "x" * 500, "rows.parquet must be a whole parquet file"),
    ],
)
def test_bad_data_is_one_clear_line(tmp_path: Path, name: str, text: str | None, rule: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=rule) as error:
        prepare(str(path), 300, tmp_path / "cache")
    assert "\n" not in str(error.value)


def test_too_small_a_vocabulary_or_split_is_refused(files: Path, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`vocab_size` must be at least 257"):  # room for every byte
        prepare(str(files), 256, tmp_path)
    with pytest.raises(ValueError, match="must hold more than 1000000 tokens"):
        require_chunks(corpus, 1_000_000)


def test_an_epoch_visits_every_chunk_once_and_the_next_in_another_order(corpus: Corpus) -> None:
    chunks = num_sequences(corpus, "train", 8)
    visited = [
        [
            tuple(train_batch(corpus, step=epoch * chunks + place, batch=1, seq_len=8, seed=0)[0][0].tolist())
            for place in range(chunks)
        ]
        for epoch in range(2)
    ]
    tokens = corpus.tokens("train").tolist()
    expected = Counter(tuple(tokens[8 * index : 8 * index + 8]) for index in range(chunks))
    assert Counter(visited[0]) == Counter(visited[1]) == expected
    assert visited[0] != visited[1]


def test_targets_are_the_next_tokens(corpus: Corpus) -> None:
    batches = [train_batch(corpus, step=3, batch=4, seq_len=16, seed=1)]
    batches += validation_batches(corpus, replace(SCALES["smoke"], validation_tokens=200, micro_batch=4, seq_len=16))
    for inputs, targets in batches:
        assert inputs.shape == targets.shape
        assert inputs[:, 1:].equal(targets[:, :-1])
    assert sum(len(inputs) for inputs, _ in batches[1:]) == 200 // 16


def test_order_depends_on_the_seed_alone(corpus: Corpus) -> None:
    first, again, other = (train_batch(corpus, step=5, batch=4, seq_len=16, seed=seed)[0] for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)
