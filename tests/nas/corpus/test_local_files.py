import bz2
import gzip
import json
import lzma
import os
import sysconfig
import warnings
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from nas.corpus.corpus import prepare
from nas.corpus.documents import by_hash, texts
from nas.corpus.sources import open_source

CUT_GZIP = gzip.compress(b'{"text": "x"}\n' * 9, mtime=0)[:-9]


def all_texts(path: Path | str, **settings: int) -> list[str]:
    source = open_source(str(path), **settings)
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
    whole = open_source(str(tmp_path), sample=10**9)
    assert len(list(texts(whole, "train"))) == 2
    assert whole.fingerprint != source.fingerprint
    (text,) = all_texts(tmp_path / "a.txt", sample=10**9)
    assert text == (tmp_path / "a.txt").read_text()


def test_a_sample_of_a_folder_has_files_of_any_name(tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(f"{number:02}")
    whole, some = (open_source(str(tmp_path), sample=num_bytes) for num_bytes in (10**9, 20))
    assert list(texts(whole, "train")) + list(texts(whole, "validation")) == all_texts(tmp_path)
    read = all_texts(tmp_path, sample=20)
    assert (len(read), read) == (10, sorted(read))
    assert read != [f"{number:02}" for number in range(10)]
    assert some.fingerprint != whole.fingerprint


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
        (["train.txt", "valid.txt", *(f"{name}.txt" for name in "abc")], None, None, set()),  # names of modules
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
        source, whole = open_source(str(folder)), open_source(str(folder), sample=10**9)
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
        source = open_source(str(tmp_path), sample=10**9)
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


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8-sig")
    assert sorted(all_texts(tmp_path / "a.jsonl")) == ["one", "two"]


def test_a_json_file_is_as_large_as_what_it_decompresses_to(tmp_path, monkeypatch):
    monkeypatch.setattr("nas.corpus.rows.MOST_JSON_BYTES", 1000)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'[{"text": "' + b"x" * 1000 + b'"}]'))
    with pytest.raises(ValueError, match=r"a\.json\.gz must be at most 1 GiB to be read as one JSON document"):
        all_texts(tmp_path / "a.json.gz")


def test_files_that_are_not_utf8_are_left_out_with_a_warning(tmp_path):
    folder = write_files(tmp_path / "files")
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.warns(UserWarning, match="latin.txt is not UTF-8, and left out; convert what"):
        open_source(str(folder))
    for path in folder.iterdir():
        path.write_bytes(b"\xe9\xff")
    with pytest.raises(ValueError, match="and 60 other files are not UTF-8"):
        open_source(str(folder))


def test_a_file_whose_name_is_not_utf8_is_left_out_and_named(tmp_path):
    folder = write_files(tmp_path / "files")
    (folder / os.fsdecode(b"bad\xff.py")).write_text("a text\n")
    (read,) = open_source(str(folder)).read
    assert read.left_out == {"with a name that is not UTF-8": (1, "bad\\xff.py")}
    json.dumps(read.left_out, ensure_ascii=False).encode()


def write_files(folder: Path, count: int = 60, name: str = "module") -> Path:
    """So many different files of 40 lines, no five lines of which are in two."""
    folder.mkdir()
    for index in range(count):
        lines = (f"def {name}_{index}_{line}(x):\n    return x + {index * line}\n" for line in range(20))
        (folder / f"{name}_{index}.py").write_text("".join(lines))
    return folder
