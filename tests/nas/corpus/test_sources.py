import bz2
import gzip
import json
import lzma
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from nas.corpus.corpus import open_corpus, prepare
from nas.corpus.documents import Document, by_hash, texts
from nas.corpus.hub import Repository, hub_stream, reach
from nas.corpus.sequences import num_sequences
from nas.corpus.sources import PAPER_CORPORA, HubDataset, open_source
from nas.training.batches import train_batch
from tests.nas.corpus.source_files import write_files

SEQ_LEN = 16
LENGTHS = [1, 15, 16, 17, 32, 33, 50]  # tokens of a document, over and over

CUT_GZIP = gzip.compress(b'{"text": "x"}\n' * 9, mtime=0)[:-9]


def row(index: int) -> str:
    """A text of as many words, each a token."""
    return " ".join(f"w{(index + place) % 397}" for place in range(LENGTHS[index % len(LENGTHS)]))


def write_tokenizer(path: Path, end: str = "<|endoftext|>") -> None:
    tokenizer = Tokenizer(models.WordLevel(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=400, special_tokens=[end, "?"], show_progress=False)
    tokenizer.train_from_iterator([f"w{index}" for index in range(398)], trainer)
    assert tokenizer.get_vocab_size() == 400
    path.write_text(tokenizer.to_str())


def write_rows(folder: Path, rows: list[str], *, column: str = "content", files: int = 2) -> None:
    folder.mkdir(parents=True)
    for index in range(files):
        parquet.write_table(pa.table({column: rows[index::files]}), folder / f"part-{index}.parquet", row_group_size=20)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Three repositories in a folder, which `codeparrot` now names."""
    write_rows(tmp_path / "train", [row(index) for index in range(700)])
    write_rows(tmp_path / "validation", [row(index) for index in range(700, 770)])
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    folders = {name: str(tmp_path / name) for name in ("train", "validation", "tokenizer")}
    dataset = HubDataset(field="content", **folders)
    corpus = replace(PAPER_CORPORA["codeparrot"], hub=dataset, vocab_size=400)
    monkeypatch.setitem(PAPER_CORPORA, "codeparrot", corpus)
    return tmp_path


@pytest.mark.needs_hf
def test_codeparrot_is_cut_into_whole_sequences_within_documents(hub):
    corpus = prepare("codeparrot", 400, hub / "cache", seq_len=SEQ_LEN)
    assert corpus.tokenizer.startswith("codeparrot-400-")
    assert corpus.chunk_len == SEQ_LEN
    # per seven documents: 17 -> 1, 32 -> 1, 33 -> 2, 50 -> 3 sequences of 16 tokens and the one after
    assert num_sequences(corpus, "train", SEQ_LEN) == 7 * 100
    assert num_sequences(corpus, "validation", SEQ_LEN) == 7 * 10
    tokenizer = Tokenizer.from_file(str(Path(corpus.folder) / "tokenizer.json"))
    for step in range(7):
        inputs, targets = train_batch(corpus, step=step, batch=100, seq_len=SEQ_LEN, seed=0)
        assert inputs[:, 1:].equal(targets[:, :-1])
        for sequence in inputs.tolist():
            words = [int(word[1:]) for word in tokenizer.decode(sequence).split()]
            assert words == [(words[0] + place) % 397 for place in range(SEQ_LEN)]  # of one document
    with pytest.raises(ValueError, match="was prepared in sequences of 16 tokens, not of 8"):
        train_batch(corpus, step=0, batch=1, seq_len=8, seed=0)


@pytest.mark.needs_hf
def test_a_smaller_vocabulary_trains_a_tokenizer_and_all_that_counts_is_in_the_fingerprint(hub):
    corpus = prepare("codeparrot", 300, hub / "cache", seq_len=SEQ_LEN)
    assert corpus.tokenizer.startswith("bpe-")
    assert corpus.chunk_len == SEQ_LEN

    def fingerprint(vocab_size: int = 400, seq_len: int = SEQ_LEN) -> str:
        return prepare("codeparrot", vocab_size, hub / "cache", seq_len=seq_len).fingerprint

    first = fingerprint()
    assert fingerprint(vocab_size=500) == first  # the same tokenizer
    fingerprints = {first, fingerprint(vocab_size=300), fingerprint(seq_len=8)}
    write_tokenizer(hub / "tokenizer" / "tokenizer.json", end="<|other|>")
    text = (hub / "tokenizer" / "tokenizer.json").read_text().replace("<|other|>", "<|endoftext|>").replace("w397", "x")
    (hub / "tokenizer" / "tokenizer.json").write_text(text)
    assert len({*fingerprints, fingerprint()}) == 4


def lacking_texts(hub):
    for path in (hub / "train").iterdir():
        parquet.write_table(pa.table({"title": ["x"], "size": [1]}), path)


def tokenizer(change):
    def broken(hub):
        path = hub / "tokenizer" / "tokenizer.json"
        path.write_text(change(path.read_text()))

    return broken


@pytest.mark.needs_hf
@pytest.mark.parametrize(
    ("broken", "seq_len", "rule"),
    [
        (lambda hub: None, None, "`seq_len` must be given"),
        (lambda hub: None, 1_000, "is empty: it has no document as long as a sequence"),
        (lacking_texts, 16, "must have a column of texts 'content', but its columns are title, size"),
        (tokenizer(lambda text: text.replace("<|endoftext|>", "<|end|>")), 16, "must have the token <|endoftext|>"),
        (tokenizer(lambda text: text[:100]), 16, "must be a whole tokenizer.json"),
        (
            tokenizer(lambda text: text.replace('"w397":', '"w397":401,"w398":')),
            16,
            "has 401 entries, but the model's .* only 400",
        ),
    ],
)
def test_what_cannot_be_prepared_is_one_line(hub, broken, seq_len, rule):
    broken(hub)
    with pytest.raises(ValueError, match=rule.replace("|", r"\|")) as error:
        prepare("codeparrot", 400, hub / "cache", seq_len=seq_len)
    assert "\n" not in str(error.value)
    assert not list((hub / "cache").glob("*/corpus.json"))


@pytest.mark.needs_hf
def test_a_local_copy_gives_the_sequences_of_the_hub(hub):
    copy = hub / "copy"
    write_rows(copy / "train", [row(index) for index in range(700)], files=1)
    (copy / "validation").mkdir()
    lines = [json.dumps({"text": row(index)}) for index in range(700, 770)]
    (copy / "validation" / "rows.jsonl").write_text("\n".join(lines))
    write_tokenizer(copy / "tokenizer.json")
    hub_corpus = prepare("codeparrot", 400, hub / "cache", seq_len=SEQ_LEN)
    other = prepare(f"codeparrot:{copy}", 400, hub / "cache", seq_len=SEQ_LEN)
    assert other.tokenizer == hub_corpus.tokenizer
    for split in ("train", "validation"):  # read in another order
        rows = [sorted(source.tokens(split).reshape(-1, SEQ_LEN + 1).tolist()) for source in (hub_corpus, other)]
        assert rows[0] == rows[1]


def test_a_copy_without_a_split_or_a_tokenizer_names_what_is_missing(tmp_path):
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "book.txt").write_text("words")
    with pytest.raises(ValueError, match="texts in .*/train, but there is no such folder"):
        prepare(f"languini:{tmp_path}", 16_384, tmp_path / "cache")
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "book.txt").write_text("other words")
    with pytest.raises(ValueError, match="must hold the tokenizer .*/books_16384.model: No such file"):
        prepare(f"languini:{tmp_path}", 16_384, tmp_path / "cache")
    with pytest.raises(ValueError, match=r"^.*withdrawn .*books_16384.model in a FOLDER and give languini:FOLDER.*$"):
        open_source("languini")


def test_a_copy_of_languini_is_documents_in_a_row(monkeypatch, tmp_path):
    corpus = replace(PAPER_CORPORA["languini"], vocab_size=400, tokenizer_file="tokenizer.json")
    monkeypatch.setitem(PAPER_CORPORA, "languini", corpus)
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        for index in range(3):
            (tmp_path / split / f"{index}.txt").write_text(f"w{index} {split[0]}")
    write_tokenizer(tmp_path / "tokenizer.json", end="<D>")
    prepared = prepare(f"languini:{tmp_path}", 400, tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    decoded = tokenizer.decode(prepared.tokens("train").tolist(), skip_special_tokens=False)
    assert decoded == "w0 ? <D> w1 ? <D> w2 ? <D>"
    assert open_corpus(Path(prepared.folder)) == prepared


class Rows:
    """A dataset that goes away after one row."""

    def __iter__(self) -> Iterator[dict]:
        yield {"text": "abc"}
        raise ConnectionError("gone\nfor good")

    def state_dict(self) -> dict:
        return {}


def test_the_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the extra `hf`; install it with pip install -e '\.\[hf\]', or put"):
        open_source("codeparrot")


@pytest.mark.needs_hf
def test_a_repository_is_pinned_to_its_present_commit_or_out_of_reach(monkeypatch):
    class Api:
        def repo_info(self, name: str, repo_type: str) -> SimpleNamespace:
            raise ConnectionError("no\nroute")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    wanted = rf"{PAPER_CORPORA['codeparrot'].hub.validation} of the .* \(ConnectionError\).* give codeparrot:FOLDER"
    with pytest.raises(ValueError, match=wanted) as error:
        open_source("codeparrot")
    assert "\n" not in str(error.value)
    api = SimpleNamespace(repo_info=lambda name, repo_type: SimpleNamespace(sha=f"{repo_type}-1"))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    assert reach("some/data", "dataset", "") == Repository("some/data", "dataset-1", "")


def test_a_hub_that_goes_away_while_it_is_read_is_one_line(monkeypatch):
    monkeypatch.setattr("nas.corpus.hub._load", lambda repository: Rows())
    monkeypatch.setattr("nas.corpus.documents.BATCH_DOCUMENTS", 1)
    batches = hub_stream(Repository("some/data", "1", "wait"), "text", "train").batches(None)
    assert next(batches).documents == [Document("train", "abc")]
    with pytest.raises(ValueError, match=r"some/data .* cannot be read \(ConnectionError\).*, or wait") as error:
        next(batches)
    assert "\n" not in str(error.value)


@pytest.mark.needs_hf
def test_a_stream_goes_on_at_its_position(monkeypatch, tmp_path):
    monkeypatch.setattr("nas.corpus.documents.BATCH_DOCUMENTS", 7)
    for index in range(3):
        rows = [f"row {index} {place}" for place in range(25)]
        parquet.write_table(pa.table({"text": rows}), tmp_path / f"part-{index}.parquet", row_group_size=10)
    stream = hub_stream(Repository(str(tmp_path), "local", ""), "text", "train")
    batches = list(stream.batches(None))
    assert [document.text for batch in batches for document in batch.documents][:30:24] == ["row 0 0", "row 0 24"]
    assert sum(len(batch.documents) for batch in batches) == 75
    for index in (0, 3, 6, 10):
        position = json.loads(json.dumps(batches[index].position))
        rest = [batch.documents for batch in stream.batches(position)]
        assert rest == [batch.documents for batch in batches[index + 1 :]]


def all_texts(path: Path | str) -> list[str]:
    source = open_source(str(path))
    return [text for split in ("train", "validation") for text in texts(source, split)]


def write_parquet(path: Path, **columns: list) -> None:
    parquet.write_table(pa.table(columns), path, row_group_size=50)


def test_no_file_is_in_both_splits_or_left_out_and_copies_are_read_once(tmp_path):
    source = open_source(str(folder := write_files(tmp_path / "files")))
    train, validation = list(texts(source, "train")), list(texts(source, "validation"))
    assert len(train) + len(validation) == 60
    assert validation
    assert not set(train) & set(validation)
    for path in list(folder.iterdir()):
        (folder / f"copy_of_{path.name}").write_bytes(path.read_bytes())
    documents = all_texts(folder)
    assert len(documents) == len(set(documents)) == 60


def test_rows_with_equal_text_fall_on_one_side(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"row {index % 100} " * 5} for index in range(300)]
    path.write_text("\n".join(map(json.dumps, rows)))
    source = open_source(str(path))
    train, validation = (Counter(texts(source, split)) for split in ("train", "validation"))
    assert not train.keys() & validation.keys()
    assert set((train + validation).values()) == {3}
    assert validation


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c", "\r"])
def test_only_a_newline_ends_a_row(tmp_path, separator):
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"row {index}{separator}goes on"} for index in range(60)]
    ends = ["\r\n" if index % 2 else "\n\n" for index in range(60)]  # as written elsewhere; blank lines are no rows
    lines = [json.dumps(row, ensure_ascii=separator < " ") + end for row, end in zip(rows, ends, strict=True)]
    path.write_bytes("".join(lines).encode())
    assert sorted(all_texts(path)) == sorted(row["text"] for row in rows)


def test_a_parquet_file_gives_its_texts_and_is_named_where_it_is_damaged(tmp_path):
    rows = [f"row {index}" for index in range(200)]
    write_parquet(tmp_path / "rows.parquet", number=list(range(201)), content=[*rows, None])
    assert sorted(all_texts(tmp_path / "rows.parquet")) == sorted(rows)
    train, validation = (set(texts(open_source(str(tmp_path / "rows.parquet")), s)) for s in ("train", "validation"))
    assert validation
    assert not train & validation
    path = tmp_path / "rows.parquet"
    write_parquet(path, text=[f"row {index}" for index in range(500)])
    raw = bytearray(path.read_bytes())
    raw[5:60] = b"\xff" * 55
    path.write_bytes(raw)
    for name in (path, tmp_path):
        with pytest.raises(ValueError, match="rows.parquet must be a whole parquet file") as error:
            prepare(str(name), 300, tmp_path / "cache")
        assert "\n" not in str(error.value)


def test_a_folder_is_read_with_its_tables(tmp_path):
    folder = write_files(tmp_path / "files")
    plain = open_source(str(folder)).fingerprint
    (folder / "more").mkdir()
    rows = [f"json {index}" for index in range(100)]
    (folder / "more" / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    (folder / "more" / "copy.jsonl").write_bytes((folder / "more" / "rows.jsonl").read_bytes())
    write_parquet(folder / "rows.parquet", text=[f"table {index}" for index in range(100)])
    documents = all_texts(folder)
    assert len(documents) == len(set(documents)) == 260
    assert {*rows, "table 0", "table 99"} < set(documents)
    assert open_source(str(folder)).fingerprint != plain
    assert prepare(str(folder), 300, tmp_path / "cache").num_validation_tokens


def test_a_txt_file_is_cut_near_its_end_between_lines_or_words(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {index}\n" for index in range(100)))
    source = open_source(str(path))
    assert next(texts(source, "train")).endswith("line 94\n")
    assert next(texts(source, "validation")).startswith("line 95\n")
    path = tmp_path / "text8.TXT"
    path.write_text(" ".join(f"word{index}" for index in range(200)))
    source = open_source(str(path))
    (train,), (validation,) = texts(source, "train"), texts(source, "validation")
    assert train + validation == path.read_text()
    assert train.endswith(" ")
    assert 0.03 < len(validation) / len(train + validation) < 0.07


def test_the_standard_library_comes_without_tests_and_packages():
    text = "".join(all_texts("stdlib"))
    root = Path(sysconfig.get_paths()["stdlib"])
    assert 5e6 < len(text) < 30e6
    assert (root / "argparse.py").read_text() in text
    excluded = [root / "idlelib" / "pyshell.py", root / "test" / "test_argparse.py"]
    assert not any(path.exists() and path.read_text() in text for path in excluded)


def test_a_path_decides_the_split_and_the_way_of_reading_is_in_the_fingerprint(tmp_path):
    held_out = [index for index in range(2_000) if by_hash(f"file_{index}") == "validation"]
    assert 0.03 < len(held_out) / 2_000 < 0.07
    assert by_hash("a") == "train"
    for suffix in (".txt", ".jsonl"):
        (tmp_path / f"rows{suffix}").write_text('{"text": "x"}\n')
    assert len({open_source(str(path)).fingerprint for path in tmp_path.iterdir()}) == 2


def test_a_stream_opened_at_a_position_goes_on_as_if_read_through(monkeypatch, tmp_path):
    monkeypatch.setattr("nas.corpus.documents.BATCH_DOCUMENTS", 7)  # batches end within files and between them
    folder = write_files(tmp_path / "files")
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": f"row {index}"}) for index in range(40)))
    write_parquet(folder / "rows.parquet", text=[f"table {index}" for index in range(40)])
    (stream,) = open_source(str(folder)).streams
    batches = list(stream.batches(None))
    assert len(batches) == 20
    assert 0.9 < batches[-1].share <= 1  # the last file may not be finished
    for index, batch in enumerate(batches):
        position = json.loads(json.dumps(batch.position))
        assert list(stream.batches(position)) == batches[index + 1 :]


def test_a_batch_of_books_is_small(monkeypatch, tmp_path):
    monkeypatch.setattr("nas.corpus.documents.BATCH_CHARACTERS", 100)
    (stream,) = open_source(str(write_files(tmp_path / "files"))).streams
    assert {len(batch.documents) for batch in stream.batches(None)} == {1}


def test_the_end_of_each_file_validates_where_they_are_too_few(tmp_path):
    for name in ("a.txt", "b.TXT"):
        (tmp_path / name).write_text("".join(f"{name} {index}\n" for index in range(100)))
    with pytest.warns(UserWarning, match="too few files to hold some out: the end of each validates"):
        source = open_source(str(tmp_path))
    assert [text.splitlines()[0] for text in texts(source, "validation")] == ["a.txt 95", "b.TXT 95"]
    assert len("".join(all_texts(tmp_path / "a.txt"))) == len((tmp_path / "a.txt").read_text())
    whole = open_source(str(tmp_path), whole_files=True)
    assert len(list(texts(whole, "train"))) == 2
    assert whole.fingerprint != source.fingerprint


def test_what_was_not_read_of_a_folder_is_said(tmp_path):
    folder, linked = write_files(tmp_path / "files"), write_files(tmp_path / "linked", 3)
    for path in linked.iterdir():
        path.write_text(f"# {path.name}\n")
    plain = open_source(str(folder))
    assert plain.read[0].lines == [f"text of {folder}: 60 of 60 files, {plain.read[0].num_bytes:,} bytes (60 .py)"]
    (linked / "round").symlink_to(folder)
    for name, target in {"link": linked, "again": linked, "self": folder, "gone.txt": tmp_path / "nothing"}.items():
        (folder / name).symlink_to(target)
    rows = {
        "rows.jsonl.gz": gzip.compress(b'{"text": "gz"}\n', mtime=0),
        "rows.jsonl.bz2": bz2.compress(b'{"text": "bz2"}\n'),
        "book.txt.xz": lzma.compress(b"xz"),
        "list.json": b'[{"text": "list 1"}, {"content": "list 2"}]',
        "lines.json": b'{"text": "line 1"}\n{"text": "line 2"}\n',
        "table.csv": b'\xef\xbb\xbfid,text\n1,"a ""cell"", of two\nlines"\n2,\n',
        "table.tsv": b"text\tid\ntabs\t1\n",
    }
    left_out = {
        "equal to another": ("of_module.py", (folder / "module_0.py").read_bytes()),
        "empty": ("empty.txt", b""),
        "of kind .pdf": ("paper.pdf", b"%PDF"),
        "without a suffix": ("LICENSE", b"free"),
        "without a text in 'text' or 'content'": ("settings.json", b'{"size": 1}'),
    }
    for name, content in (*rows.items(), *left_out.values()):
        (folder / name).write_bytes(content)
    (folder / "numbers.csv").write_text("a,b\n1,2\n")
    write_parquet(folder / "dictionary.parquet", text=pa.array(["once", "once"]).dictionary_encode())
    source = open_source(str(folder))
    expected = {reason: [1, name] for reason, (name, _) in left_out.items()} | {"linked to nothing": [1, "gone.txt"]}
    expected["without a text in 'text' or 'content'"] = [2, "numbers.csv"]
    assert {reason: list(left) for reason, left in source.read[0].left_out.items()} == expected
    new = ['a "cell", of two\nlines', "bz2", "gz", "line 1", "line 2", "list 1", "list 2", "once", "once", "tabs", "xz"]
    behind_links = [f"# module_{index}.py\n" for index in range(3)]
    before = [text for split in ("train", "validation") for text in texts(plain, split)]
    assert sorted(all_texts(folder)) == sorted([*before, *behind_links, *new, ""])
    said = source.read[0].lines
    assert said[0].startswith(f"text of {folder}: 71 of 78 files, ")
    assert said[0].endswith(" (1 .csv, 2 .json, 2 .jsonl, 1 .parquet, 63 .py, 1 .tsv, 1 .txt)")
    assert said[1].startswith("not read: 2 without a text in 'text' or 'content' (such as numbers.csv); ")


@pytest.mark.parametrize(
    ("names", "train", "validation", "left_out"),
    [
        (["data/train-0.parquet", "data/test-0.parquet"], None, None, {"data/test-0.parquet"}),
        (["train.jsonl", "dev.jsonl", "eval.jsonl"], {"train.jsonl"}, {"dev.jsonl"}, {"eval.jsonl"}),
        (
            ["en/train/a.txt", "en/valid/a.txt", "en/test/a.txt"],
            {"en/train/a.txt"},
            {"en/valid/a.txt"},
            {"en/test/a.txt"},
        ),
        (["train.csv", "other.csv", "val.csv"], {"train.csv", "other.csv"}, {"val.csv"}, set()),
        (["all.jsonl", "test.jsonl"], None, None, set()),  # no split is called train
        (["train.py", "test_it.py", "latest.txt", "constrain.txt"], None, None, set()),  # code, and parts of words
    ],
)
def test_splits_that_names_state_are_kept_apart(tmp_path, names, train, validation, left_out):
    for name in names:
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [f"{name} {index}" for index in range(20)]
        if path.suffix == ".parquet":
            write_parquet(path, text=rows)
        elif path.suffix == ".jsonl":
            path.write_text("\n".join(json.dumps({"text": row}) for row in rows))
        else:
            path.write_text("\n".join(["text", *rows] if path.suffix == ".csv" else rows))
    folder = tmp_path / "data"
    with warnings.catch_warnings(action="ignore"):  # too few files to hold some out
        source, whole = open_source(str(folder)), open_source(str(folder), whole_files=True)
    read = {split: {text.split()[0] for text in texts(source, split)} for split in ("train", "validation")}
    assert read["train"] | read["validation"] == set(names) - left_out
    if train is not None:
        assert (read["train"], read["validation"]) == (train, validation)
        assert [stream.split for stream in source.streams] == ["validation", "train"]
        assert source.fingerprint != whole.fingerprint
    assert {name for _, name in source.read[0].left_out.values()} == left_out
    assert not whole.read[0].left_out  # as a second corpus, nothing of which is trained on


@pytest.mark.parametrize(
    ("card", "others", "is_card"),
    [
        ("# Of rows", ["rows.jsonl"], True),
        ("---\npretty_name: Books\n---\n# Books", ["a.txt"], True),
        ("---\ntitle: Notes\n---\n# Notes", ["a.txt"], False),
        ("# Of code", ["code.py", "rows.jsonl"], False),
    ],
)
def test_the_card_of_a_data_set_is_not_trained_on(tmp_path, card, others, is_card):
    for name in others:
        (tmp_path / name).write_text('{"text": "row"}\n')
    (tmp_path / "README.md").write_text(card)
    with warnings.catch_warnings(action="ignore"):
        source = open_source(str(tmp_path), whole_files=True)
    assert (card in [text for split in ("train", "validation") for text in texts(source, split)]) != is_card
    assert source.read[0].left_out == ({"of a data set's card": (1, "README.md")} if is_card else {})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz cannot be read: Not a gzipped file"),
        ("a.jsonl.gz", CUT_GZIP, "a.jsonl.gz cannot be read: Compressed file ended"),
        ("a.json", b'[{"text": "x"}, {"size": 1}]', "a.json, row 2 must be a JSON object with a text in 'text' or"),
        ("a.csv", b"id\n1\n", "a.csv must have a column of texts named 'text' or 'content'"),
        ("a.csv", b"text\n\xff\n", "a.csv must be text in UTF-8, but holds other bytes"),
    ],
)
def test_rows_that_cannot_be_read_are_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        all_texts(tmp_path / name)


def test_files_that_are_not_utf8_are_left_out_with_a_warning(tmp_path):
    folder = write_files(tmp_path / "files")
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.warns(UserWarning, match="latin.txt is not UTF-8, and left out; convert what"):
        open_source(str(folder))
    for path in folder.iterdir():
        path.write_bytes(b"\xe9\xff")
    with pytest.raises(ValueError, match="and 60 other files are not UTF-8"):
        open_source(str(folder))
