import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from nas.corpus.corpus import open_corpus, prepare
from nas.corpus.documents import Document
from nas.corpus.sequences import num_sequences
from nas.corpus.sources import PAPER_CORPORA, Repository, hub_stream, open_source, reach
from nas.private.fixed_point import validation_sequences
from nas.training.batches import train_batch

SEQ_LEN = 16
LENGTHS = [1, 15, 16, 17, 32, 33, 50]  # tokens of a document, over and over


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
    corpus = replace(PAPER_CORPORA["codeparrot"], hub=folders, vocab_size=400)
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
    assert validation_sequences(corpus, 100, context=256).shape == (6, SEQ_LEN + 1)
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
    wanted = rf"{PAPER_CORPORA['codeparrot'].hub['validation']} of the .* \(ConnectionError\).* give codeparrot:FOLDER"
    with pytest.raises(ValueError, match=wanted) as error:
        open_source("codeparrot")
    assert "\n" not in str(error.value)
    api = SimpleNamespace(repo_info=lambda name, repo_type: SimpleNamespace(sha=f"{repo_type}-1"))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    assert reach("some/data", "dataset", "") == Repository("some/data", "dataset-1", "")


def test_a_hub_that_goes_away_while_it_is_read_is_one_line(monkeypatch):
    monkeypatch.setattr("nas.corpus.sources._load", lambda repository: Rows())
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
