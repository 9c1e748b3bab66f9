import json
import sysconfig
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from nas.corpus.corpus import prepare
from nas.corpus.documents import by_hash, texts
from nas.corpus.sources import open_source
from tests.nas.corpus.source_files import write_files


def all_texts(path: Path | str) -> list[str]:
    source = open_source(str(path))
    return [text for split in ("train", "validation") for text in texts(source, split)]


def write_parquet(path: Path, **columns: list) -> None:
    parquet.write_table(pa.table(columns), path, row_group_size=50)


def test_no_file_is_in_both_splits_nor_left_out(tmp_path):
    source = open_source(str(write_files(tmp_path / "files")))
    train, validation = list(texts(source, "train")), list(texts(source, "validation"))
    assert len(train) + len(validation) == 60
    assert validation
    assert not set(train) & set(validation)


def test_exact_copies_are_read_once(tmp_path):
    folder = write_files(tmp_path / "files")
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


def test_a_parquet_file_gives_its_texts(tmp_path):
    rows = [f"row {index}" for index in range(200)]
    write_parquet(tmp_path / "rows.parquet", number=list(range(201)), content=[*rows, None])
    assert sorted(all_texts(tmp_path / "rows.parquet")) == sorted(rows)
    train, validation = (set(texts(open_source(str(tmp_path / "rows.parquet")), s)) for s in ("train", "validation"))
    assert validation
    assert not train & validation


def test_a_parquet_file_damaged_in_the_middle_is_one_line_that_names_it(tmp_path):
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


def test_equal_bytes_read_in_another_way_have_another_fingerprint(tmp_path):
    for suffix in (".txt", ".jsonl"):
        (tmp_path / f"rows{suffix}").write_text('{"text": "x"}\n')
    assert len({open_source(str(path)).fingerprint for path in tmp_path.iterdir()}) == 2


def test_a_txt_file_is_cut_near_its_end(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {index}\n" for index in range(100)))
    source = open_source(str(path))
    assert next(texts(source, "train")).endswith("line 94\n")
    assert next(texts(source, "validation")).startswith("line 95\n")


def test_the_standard_library_comes_without_tests_and_packages():
    text = "".join(all_texts("stdlib"))
    root = Path(sysconfig.get_paths()["stdlib"])
    assert 5e6 < len(text) < 30e6
    assert (root / "argparse.py").read_text() in text
    excluded = [root / "idlelib" / "pyshell.py", root / "test" / "test_argparse.py"]
    assert not any(path.exists() and path.read_text() in text for path in excluded)


def test_the_split_of_a_file_depends_on_its_path_alone():
    held_out = [index for index in range(2_000) if by_hash(f"file_{index}") == "validation"]
    assert 0.03 < len(held_out) / 2_000 < 0.07
    assert by_hash("a") == "train"


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


def test_a_text_of_one_line_is_cut_between_words(tmp_path):
    path = tmp_path / "text8.TXT"
    path.write_text(" ".join(f"word{index}" for index in range(200)))
    source = open_source(str(path))
    (train,), (validation,) = texts(source, "train"), texts(source, "validation")
    assert train + validation == path.read_text()
    assert train.endswith(" ")
    assert 0.03 < len(validation) / len(train + validation) < 0.07


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


def test_files_that_are_not_utf8_are_left_out_with_a_warning(tmp_path):
    folder = write_files(tmp_path / "files")
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.warns(UserWarning, match="latin.txt is not UTF-8, and left out; convert what"):
        open_source(str(folder))
    for path in folder.iterdir():
        path.write_bytes(b"\xe9\xff")
    with pytest.raises(ValueError, match="and 60 other files are not UTF-8"):
        open_source(str(folder))
