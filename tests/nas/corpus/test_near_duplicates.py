import json
from pathlib import Path

import numpy as np
import pytest

from costmodel.errors import UserError
from nas.conversion.parent import BUILTIN_FOLDER
from nas.conversion.pretrained import read_windows
from nas.corpus.corpus import Corpus, open_corpus, prepare
from nas.corpus.documents import by_hash
from nas.corpus.held_out import MOST_GROUPS, grouped, trained_on
from nas.corpus.near_duplicates import kept_documents, repeated, to_keep, window_hashes
from tests.nas.corpus.source_files import write_files

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


def test_windows_are_found_in_every_part_and_in_what_is_kept_of_a_parents():
    windows = window_hashes("\n".join(LINES))
    parts = [windows[:2], windows[6:7]]
    assert repeated(windows[:4], parts, None).tolist() == [True, True, False, False]
    assert repeated(windows[:4], [], to_keep(windows[2:])).tolist() == [False, False, True, True]


def test_copies_are_left_out_and_then_the_largest_shares():
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


def test_a_copy_of_training_text_does_not_validate(folder, tmp_path):
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


def test_what_a_parent_was_trained_on_does_not_validate(folder, tmp_path):
    whole = prepare(str(folder), 300, tmp_path / "cache")
    first, *others = held_out_names(whole)
    of_parent = to_keep(window_hashes((folder / first).read_text()))
    kept_corpus = prepare(str(folder), 300, tmp_path / "cache", of_parent=of_parent)
    assert held_out_names(kept_corpus) == others
    assert kept_corpus.fingerprint != whole.fingerprint


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


def test_the_builtin_parent_comes_with_the_windows_of_its_text(folder, tmp_path):
    windows = read_windows(BUILTIN_FOLDER)
    assert windows is not None
    assert len(windows) == 189_152
    corpus = prepare(str(folder), 300, tmp_path / "cache")
    kept = trained_on(Path(corpus.folder))
    assert kept is not None
    assert not np.isin(kept, windows).any()


def test_damaged_windows_are_one_clear_line(tmp_path):
    (tmp_path / "trained-on.u32").write_bytes(b"\2\0\0\0\1\0\0\0")
    with pytest.raises(UserError, match="trained-on.u32 must be rising numbers of 32 bits, as nas.export writes them"):
        read_windows(tmp_path)
    assert read_windows(tmp_path / "nowhere") is None
