import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer

from costmodel.errors import UserError
from nas.conversion.parent import BUILTIN_FOLDER
from nas.conversion.pretrained import read_windows
from nas.corpus import second as module
from nas.corpus.corpus import Corpus, open_corpus, prepare, require_chunks
from nas.corpus.documents import by_hash, texts
from nas.corpus.held_out import MOST_GROUPS, grouped, kept_documents, repeated, to_keep, trained_on, window_hashes
from nas.corpus.ngrams import ngram_baseline
from nas.corpus.second import require_sequences, second_corpus, second_source
from nas.corpus.sequences import held_out_targets, num_sequences
from nas.corpus.sources import open_source
from nas.corpus.tokenizer import END_OF_TEXT
from nas.recipe.recipe import SCALES
from nas.training.batches import train_batch, validation_batches
from tests.nas.corpus.test_local_files import write_files


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    return write_files(tmp_path_factory.mktemp("data") / "files")


@pytest.fixture(scope="module")
def corpus(files: Path, tmp_path_factory) -> Corpus:
    return prepare(str(files), 300, tmp_path_factory.mktemp("cache"))


def test_tokens_decode_to_the_documents_and_have_the_unigram_loss(files, corpus):
    tokenizer = Tokenizer.from_file(str(Path(corpus.folder) / "tokenizer.json"))
    for split in ("train", "validation"):
        tokens = corpus.tokens(split)
        assert tokens.dtype == np.uint16
        text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        assert text == "".join(f"{document}{END_OF_TEXT}" for document in texts(open_source(str(files)), split))
    counts = Counter(corpus.tokens("train").tolist())
    total = corpus.num_train_tokens + corpus.vocab_size
    losses = [-math.log((counts[token] + 1) / total) for token in corpus.tokens("validation").tolist()]
    assert corpus.unigram_loss == pytest.approx(sum(losses) / len(losses))


def test_the_tokenizer_never_saw_the_validation_split(tmp_path):
    folder = write_files(tmp_path / "files")
    before = prepare(str(folder), 300, tmp_path / "cache")
    held_out = next(path for path in folder.iterdir() if by_hash(path.name) == "validation")
    held_out.write_text("zyxw vuts " * 5_000)
    after = prepare(str(folder), 300, tmp_path / "cache")
    assert after.tokenizer == before.tokenizer
    assert after.fingerprint != before.fingerprint


def test_a_second_preparation_is_the_first(files, corpus, monkeypatch):
    monkeypatch.setattr("nas.corpus.token_files.extend", lambda *args: pytest.fail("the cache was not used"))
    assert prepare(str(files), 300, Path(corpus.folder).parent) == corpus


def test_text_and_vocabulary_are_part_of_the_fingerprint(tmp_path):
    folder = write_files(tmp_path / "files")
    first = prepare(str(folder), 300, tmp_path / "cache").fingerprint
    assert prepare(str(folder), 310, tmp_path / "cache").fingerprint != first
    with pytest.MonkeyPatch.context() as patch:  # another version may learn other merges
        patch.setattr("nas.corpus.corpus.tokenizers_version", "0.0.1")
        assert prepare(str(folder), 300, tmp_path / "cache").fingerprint != first
    (folder / "module_0.py").write_text("changed = True\n")
    assert prepare(str(folder), 300, tmp_path / "cache").fingerprint != first


@pytest.mark.parametrize("damage", ["shorter", "garbage", "record"])
def test_a_torn_entry_is_prepared_again(tmp_path, damage):
    folder = write_files(tmp_path / "files")
    first = prepare(str(folder), 300, tmp_path / "cache")
    tokens = first.tokens("train").tolist()
    train, facts = Path(first.folder) / "train.bin", Path(first.folder) / "corpus.json"
    library = Path(first.folder) / "library-9"  # of trained sub-layers
    library.mkdir()
    if damage == "shorter":
        train.write_bytes(train.read_bytes()[:-3])
    elif damage == "record":
        facts.unlink()
        (Path(first.folder) / "progress.json").write_text('{"lengths": 3}')
    else:
        facts.write_bytes(b"\xff{")
    with pytest.warns(UserWarning, match="preparing the corpus anew"):
        again = prepare(str(folder), 300, tmp_path / "cache")
    assert (again, again.tokens("train").tolist()) == (first, tokens)
    assert library.is_dir()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.fingerprint]


def test_processes_preparing_at_once_agree(files, tmp_path):
    code = (
        "import sys; from pathlib import Path; from nas.corpus.corpus import prepare\n"
        "print(prepare(sys.argv[1], 300, Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(files), str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=60)[0].strip() for process in processes}
    (entry,) = tmp_path.iterdir()
    assert printed == {str(open_corpus(entry))}


NO_TEXT = r"files must hold text in \.txt, \.py, \.md, \.jsonl, \.parquet, \.json, \.csv, \.tsv files"


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
        ("rows.parquet", {"title": ["x"]}, "rows.parquet must have a column of texts named 'text' or 'content'"),
        ("rows.parquet", {"text": [1, 2]}, "rows.parquet must have a column of texts named 'text' or 'content'"),
        ("book.txt", b"\xff\xfe\x00", "must be text in UTF-8"),
        *(
            (f"files/{name}", raw, NO_TEXT)
            for name, raw in (("image.png", "x"), ("empty.txt", ""), ("a.txt", b"\xff\xfe"))
        ),
        ("files", ..., NO_TEXT),
    ],
)
def test_bad_data_is_one_clear_line(tmp_path, name, text, rule):
    path = tmp_path / name
    (path if text is ... else path.parent).mkdir(exist_ok=True)
    if isinstance(text, dict):
        parquet.write_table(pa.table(text), path)
    elif isinstance(text, bytes):
        path.write_bytes(text)
    elif isinstance(text, str):
        path.write_text(text)
    with pytest.raises(ValueError, match=rule) as error:
        prepare(str(tmp_path / name.partition("/")[0]), 300, tmp_path / "cache")
    assert "\n" not in str(error.value)


def test_too_small_a_vocabulary_or_split_is_refused(files, corpus, tmp_path):
    with pytest.raises(ValueError, match="`vocab_size` must be at least 257"):  # room for every byte
        prepare(str(files), 256, tmp_path)
    with pytest.raises(ValueError, match="must hold more than 1000000 tokens"):
        require_chunks(corpus, 1_000_000)


def test_an_epoch_visits_every_chunk_once_and_the_next_in_another_order(corpus):
    chunks = num_sequences(corpus, "train", 64)
    visited = [
        [
            tuple(train_batch(corpus, step=epoch * chunks + place, batch=1, seq_len=64, seed=0)[0][0].tolist())
            for place in range(chunks)
        ]
        for epoch in range(2)
    ]
    tokens = corpus.tokens("train").tolist()
    expected = Counter(tuple(tokens[64 * index : 64 * index + 64]) for index in range(chunks))
    assert Counter(visited[0]) == Counter(visited[1]) == expected
    assert visited[0] != visited[1]
    first, again, other = (train_batch(corpus, step=5, batch=4, seq_len=16, seed=seed)[0] for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)


def test_targets_are_the_next_tokens(corpus):
    batches = [train_batch(corpus, step=3, batch=4, seq_len=16, seed=1)]
    batches += validation_batches(corpus, replace(SCALES["smoke"], validation_tokens=200, micro_batch=4, seq_len=16))
    for inputs, targets in batches:
        assert inputs.shape == targets.shape
        assert inputs[:, 1:].equal(targets[:, :-1])
    assert sum(len(inputs) for inputs, _ in batches[1:]) == 200 // 16


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return prepare(str(write_files(tmp_path / "first", 60, "value")), 300)


def made(folder: Path, first: Corpus, of_parent=None) -> Corpus:
    return second_corpus(str(folder), second_source(str(folder)), first, of_parent)


def test_all_of_it_validates_in_the_tokens_of_the_first(first, tmp_path):
    folder = write_files(tmp_path / "other", 5, "other")
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


def test_n_grams_of_the_first_are_looked_up_in_it(first, tmp_path):
    second = made(write_files(tmp_path / "other", 5, "other"), first)
    here, there = (
        ngram_baseline(first, second=other_corpus, seq_len=16, validation_tokens=10**6)
        for other_corpus in (None, second)
    )
    assert here.tokens == there.tokens
    assert here.losses[2] < there.losses[2]
    assert ngram_baseline(first, second=second, seq_len=16, validation_tokens=10**6) == there


def test_one_that_cannot_be_a_second_is_refused_in_one_line(first, tmp_path):
    folder = write_files(tmp_path / "other", 5, "other")
    of_parent = to_keep(window_hashes((folder / "other_3.py").read_text()))
    small = made(folder, first)
    (empty := tmp_path / "empty.jsonl").write_text("")
    copied = write_files(tmp_path / "copied", 1, "copied")
    (copied / "moved.py").write_text((tmp_path / "first" / "value_7.py").read_text())
    for refused, said in (
        (lambda: made(copied, first), "must be other text than --data .* but shares 1 files with them, moved.py"),
        (lambda: made(folder, first, of_parent), "parent was trained on, but shares 1 files with them, other_3.py"),
        (
            lambda: require_sequences(made(empty, first), 16),
            "must hold more than 16 tokens for an n-gram baseline, but",
        ),
        (lambda: require_sequences(small, 10**5), "must hold more than 100000 tokens for an n-gram baseline, but has"),
    ):
        with pytest.raises(UserError, match=said) as error:
            refused()
        assert "\n" not in str(error.value)


def test_dependencies_are_the_same_files_every_time(first, monkeypatch):
    monkeypatch.setattr(module, "PACKAGES", ("rich", "nowhere-installed", "networkx"))
    monkeypatch.setattr(module, "FILES_OF_EACH", 2)
    source = second_source("dependencies")
    names = [document.name for document in source.documents]
    assert [name.split("/")[0] for name in names] == ["rich", "rich", "networkx", "networkx"]
    assert not any("test" in name for name in names)
    assert second_source("dependencies") == source
    assert second_corpus("dependencies", source, first, None).num_validation_tokens > 1_000


LINES = [f"line {number}" for number in range(12)]


def test_a_window_is_five_lines_whatever_the_layout():
    plain = window_hashes("\n".join(LINES))
    laid_out = window_hashes("\n\n".join(f"    {line}  \n  }})" for line in LINES))
    assert len(plain) == len(np.unique(plain)) == 12 - 4
    assert (laid_out == plain).all()
    assert (window_hashes("\n".join(LINES[3:])) == plain[3:]).all()
    moved = window_hashes("\n".join([LINES[1], LINES[0], *LINES[2:5]]))
    assert moved[0] != plain[0]  # order counts
    # a short document is one window, and one without words none
    assert len(window_hashes("one\ntwo")) == 1
    assert window_hashes("one\ntwo")[0] not in window_hashes("one\ntwo\nthree\nfour\nfive")
    assert len(window_hashes("---\n\n")) == 0


def test_windows_are_found_in_every_part_and_copies_left_out_before_the_largest_shares():
    windows = window_hashes("\n".join(LINES))
    parts = [windows[:2], windows[6:7]]
    assert repeated(windows[:4], parts, None).tolist() == [True, True, False, False]
    assert repeated(windows[:4], [], to_keep(windows[2:])).tolist() == [False, False, True, True]
    # 11 of 100 is a copy. Of 1,010 windows left 27 are repeated, which is too many; without the 9 %, 18 of 910 are not
    num_windows = np.array([100, 100, 400, 400, 110])
    num_repeated = np.array([11, 9, 8, 8, 2])
    assert kept_documents(num_windows, num_repeated).tolist() == [False, False, True, True, True]
    assert kept_documents(num_windows[1:], np.array([9, 0, 0, 0])).all()
    assert kept_documents(np.array([0]), np.array([0])).all()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "data", 80)


def held_out_names(corpus: Corpus) -> list[str]:
    return [name for name, _ in corpus.held_out.documents]


def test_copies_of_training_text_and_what_a_parent_was_trained_on_do_not_validate(folder, tmp_path):
    whole = prepare(str(folder), 300, tmp_path / "cache")
    first, *others = held_out_names(whole)
    of_parent = to_keep(window_hashes((folder / first).read_text()))
    kept_corpus = prepare(str(folder), 300, tmp_path / "cache", of_parent=of_parent)
    assert held_out_names(kept_corpus) == others
    assert kept_corpus.fingerprint != whole.fingerprint
    whole = prepare(str(folder), 300, tmp_path / "cache")
    names = held_out_names(whole)
    assert names == sorted(path.name for path in folder.iterdir() if by_hash(path.name) == "validation")
    assert sum(size for _, size in whole.held_out.documents) == whole.num_validation_tokens
    trained = next(path for path in folder.iterdir() if by_hash(path.name) == "train")
    (folder / names[0]).write_text("# moved\n" + trained.read_text())
    without = prepare(str(folder), 300, tmp_path / "cache")
    assert held_out_names(without) == names[1:]
    assert without.held_out.num_left_out == 1
    assert without.held_out.tokens_left_out > 30
    assert len(without.tokens("validation")) == without.num_validation_tokens
    assert open_corpus(Path(without.folder)) == without


def test_copies_alone_are_refused_in_one_line(tmp_path):
    row = "\n".join(f"line {number}" for number in range(20))
    numbered = [f"# copy {number}\n{row}" for number in range(100)]
    assert {by_hash(text) for text in numbered} == {"train", "validation"}
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in numbered))
    with pytest.raises(UserError, match="must have a document that repeats nothing") as error:
        prepare(str(tmp_path / "rows.jsonl"), 300, tmp_path / "cache")
    assert "\n" not in str(error.value)


def test_many_documents_are_kept_in_groups_of_neighbours():
    documents = [(f"row {index}", index) for index in range(1_000)]
    groups = grouped(documents)
    assert len(groups) == MOST_GROUPS
    assert sum(size for _, size in groups) == sum(range(1_000))
    assert groups[0] == ("row 0 and 14 more", sum(range(15)))
    assert grouped(documents[:3]) == tuple(documents[:3])


def test_the_builtin_parent_comes_with_the_windows_of_its_text_and_damaged_ones_are_refused(folder, tmp_path):
    windows = read_windows(BUILTIN_FOLDER)
    assert windows is not None
    assert len(windows) == 189_152
    corpus = prepare(str(folder), 300, tmp_path / "cache")
    kept = trained_on(Path(corpus.folder))
    assert kept is not None
    assert not np.isin(kept, windows).any()
    (tmp_path / "trained-on.u32").write_bytes(b"\2\0\0\0\1\0\0\0")
    with pytest.raises(UserError, match="trained-on.u32 must be rising numbers of 32 bits, as nas.export writes them"):
        read_windows(tmp_path)
    assert read_windows(tmp_path / "nowhere") is None
