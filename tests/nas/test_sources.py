"""Documents: split without leakage, every row once, and one clear line for what cannot be read."""

import json
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet

from nas.data import prepare
from nas.sources import HUB_DATASETS, is_validation, open_source


def write_files(folder: Path) -> Path:
    """60 different files."""
    folder.mkdir()
    for index in range(60):
        (folder / f"module_{index}.py").write_text(f"x = {index}\n" * 20)
    return folder


def all_texts(path: Path) -> list[str]:
    source = open_source(str(path))
    return [text for split in ("train", "validation") for text in source.documents(split)]


def write_parquet(path: Path, **columns: list) -> None:
    parquet.write_table(pa.table(columns), path, row_group_size=50)


def test_no_file_is_in_both_splits_nor_left_out(tmp_path: Path) -> None:
    source = open_source(str(write_files(tmp_path / "files")))
    train, validation = list(source.documents("train")), list(source.documents("validation"))
    assert len(train) + len(validation) == 60
    assert validation
    assert not set(train) & set(validation)


def test_exact_copies_are_read_once(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "files")
    for path in list(folder.iterdir()):
        (folder / f"copy_of_{path.name}").write_bytes(path.read_bytes())
    source = open_source(str(folder))
    texts = [text for split in ("train", "validation") for text in source.documents(split)]
    assert len(texts) == len(set(texts)) == 60


def test_rows_with_equal_text_fall_on_one_side(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"row {index % 100} " * 5} for index in range(300)]
    path.write_text("\n".join(map(json.dumps, rows)))
    source = open_source(str(path))
    train, validation = (Counter(source.documents(split)) for split in ("train", "validation"))
    assert not train.keys() & validation.keys()
    assert set((train + validation).values()) == {3}
    assert validation


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c", "\r"])
def test_only_a_newline_ends_a_row(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"row {index}{separator}goes on"} for index in range(60)]
    ends = ["\r\n" if index % 2 else "\n\n" for index in range(60)]  # as written elsewhere; blank lines are no rows
    lines = [json.dumps(row, ensure_ascii=separator < " ") + end for row, end in zip(rows, ends, strict=True)]
    path.write_bytes("".join(lines).encode())
    assert sorted(all_texts(path)) == sorted(row["text"] for row in rows)


def test_a_parquet_file_gives_its_texts(tmp_path: Path) -> None:
    texts = [f"row {index}" for index in range(200)]
    write_parquet(tmp_path / "rows.parquet", number=list(range(201)), content=[*texts, None])
    assert sorted(all_texts(tmp_path / "rows.parquet")) == sorted(texts)
    train, validation = (set(open_source(str(tmp_path / "rows.parquet")).documents(s)) for s in ("train", "validation"))
    assert validation
    assert not train & validation


@pytest.mark.parametrize("columns", [{"title": ["x"]}, {"text": [1, 2]}])
def test_a_parquet_file_without_texts_is_refused(tmp_path: Path, columns: dict) -> None:
    write_parquet(tmp_path / "rows.parquet", **columns)
    with pytest.raises(ValueError, match="rows.parquet must have a column of texts named 'text' or 'content'"):
        prepare(str(tmp_path / "rows.parquet"), 300, tmp_path / "cache")


def test_a_parquet_file_damaged_in_the_middle_is_one_line_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_parquet(path, text=[f"row {index}" for index in range(500)])
    raw = bytearray(path.read_bytes())
    raw[5:60] = b"\xff" * 55
    path.write_bytes(raw)
    for name in (path, tmp_path):
        with pytest.raises(ValueError, match="rows.parquet must be a whole parquet file") as error:
            prepare(str(name), 300, tmp_path / "cache")
        assert "\n" not in str(error.value)


def test_a_folder_is_read_with_its_tables(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "files")
    plain = open_source(str(folder)).fingerprint
    (folder / "more").mkdir()
    rows = [f"json {index}" for index in range(100)]
    (folder / "more" / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    (folder / "more" / "copy.jsonl").write_bytes((folder / "more" / "rows.jsonl").read_bytes())
    write_parquet(folder / "rows.parquet", text=[f"table {index}" for index in range(100)])
    found = all_texts(folder)
    assert len(found) == len(set(found)) == 260
    assert {*rows, "table 0", "table 99"} < set(found)
    assert open_source(str(folder)).fingerprint != plain
    assert prepare(str(folder), 300, tmp_path / "cache").num_validation_tokens


@pytest.mark.parametrize("files", [{}, {"image.png": b"x"}, {"empty.txt": b""}, {"bytes.txt": b"\xff\xfe"}])
def test_a_folder_without_text_is_one_clear_line(tmp_path: Path, files: dict[str, bytes]) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    with pytest.raises(
        ValueError, match=r"files must hold text in \.txt, \.py, \.md, \.jsonl, \.parquet files"
    ) as error:
        open_source(str(folder))
    assert "\n" not in str(error.value)


def test_equal_bytes_read_in_another_way_have_another_fingerprint(tmp_path: Path) -> None:
    for suffix in (".txt", ".jsonl"):
        (tmp_path / f"rows{suffix}").write_text('{"text": "x"}\n')
    assert len({open_source(str(path)).fingerprint for path in tmp_path.iterdir()}) == 2


def test_a_txt_file_is_cut_near_its_end(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {index}\n" for index in range(100)))
    source = open_source(str(path))
    assert next(source.documents("train")).endswith("line 94\n")
    assert next(source.documents("validation")).startswith("line 95\n")


def test_the_standard_library_comes_without_tests_and_packages() -> None:
    source = open_source("stdlib")
    texts = "".join(source.documents("train")) + "".join(source.documents("validation"))
    root = Path(sysconfig.get_paths()["stdlib"])
    assert 5e6 < len(texts) < 30e6
    assert (root / "argparse.py").read_text() in texts
    excluded = [root / "idlelib" / "pyshell.py", root / "test" / "test_argparse.py"]
    assert not any(path.exists() and path.read_text() in texts for path in excluded)


def test_the_split_of_a_file_depends_on_its_path_alone() -> None:
    held_out = [index for index in range(2_000) if is_validation(f"file_{index}")]
    assert 0.03 < len(held_out) / 2_000 < 0.07
    assert not is_validation("a")


def test_a_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="must be text in UTF-8"):
        open_source(str(tmp_path / "book.txt"))


def test_hub_data_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install '\.\[hf\]'"):
        open_source("codeparrot")


def hub_of(monkeypatch: pytest.MonkeyPatch, rows: Callable[[], Iterator[dict]], known: str) -> None:
    """A hub with one dataset."""

    class Api:
        def dataset_info(self, repository: str) -> SimpleNamespace:
            if repository != known:
                raise RuntimeError("404\nnot found")
            return SimpleNamespace(sha="1")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *args, **rest: rows()))
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=Api))


def test_a_dataset_that_the_hub_does_not_have_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_of(monkeypatch, lambda: iter([]), known=HUB_DATASETS["codeparrot"].train)
    for name, missing in (("languini", "the_pile_books3"), ("codeparrot", HUB_DATASETS["codeparrot"].validation)):
        with pytest.raises(
            ValueError, match=f"data '{name}' needs the dataset {missing} of the Hugging Face hub"
        ) as error:
            open_source(name)
        assert "\n" not in str(error.value)


def test_a_hub_that_goes_away_while_it_is_read_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict]:
        yield {"text": "abc"}
        raise ConnectionError("gone")

    hub_of(monkeypatch, rows, known="the_pile_books3")
    documents = open_source("languini").documents("train")
    assert next(documents) == "abc"
    with pytest.raises(ValueError, match=r"the_pile_books3 .* cannot be read \(ConnectionError\)"):
        next(documents)
