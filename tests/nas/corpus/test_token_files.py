import errno
import json
import os
import re
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from nas.corpus.corpus import Corpus, known_corpus, prepare, tokenizer_folder
from nas.corpus.documents import Batch, Document, DocumentSource, Stream, by_hash
from nas.corpus.foreign_tokenizer import to_json
from nas.corpus.sequences import gather, held_out_targets, loss_shares, mean_loss
from nas.corpus.token_files import level_of
from nas.corpus.tokenizer import Encoder, id_type, train_tokenizer, trained_encoder

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


@pytest.mark.usefixtures("small")
def test_a_text_is_read_until_it_validates(tmp_path):
    texts = [" ".join(f"{index * place % 97}" for place in range(30)) for index in range(400)]
    late = sorted(texts, key=lambda text: by_hash(text) == "validation")  # after 20,000 tokens
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in late))
    high, low = (prepare(str(tmp_path / "rows.jsonl"), 300, tmp_path / "a", tokens=tokens) for tokens in (9_000, 4_000))
    assert (high.num_train_tokens, low.num_train_tokens) == (10_000, 5_000)
    alone = prepare(str(tmp_path / "rows.jsonl"), 300, tmp_path / "b", tokens=4_000)
    assert alone.num_validation_tokens == low.num_validation_tokens > 0


def test_a_killed_preparation_goes_on_from_its_last_record(rows, tmp_path):
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


def test_only_what_a_run_needs_is_prepared_and_more_later(small, rows, tmp_path):
    first = prepare(str(rows), 300, tmp_path / "cache", tokens=3_000)
    assert first.num_train_tokens == 5_000
    assert Path(first.folder, "train.bin").stat().st_size < 2 * 6_000
    before = contents(first)
    second = prepare(str(rows), 300, tmp_path / "cache", tokens=5_001)
    assert (second.num_train_tokens, second.tokens("train")[:5_000].tolist()) == (10_000, before[0])
    whole = prepare(str(rows), 300, tmp_path / "cache", tokens=10**9)
    assert 10_000 < whole.num_train_tokens < 10**6
    assert len({corpus.fingerprint for corpus in (first, second, whole)}) == 3
    assert prepare(str(rows), 300, tmp_path / "cache", tokens=3_000) == first
    assert contents(first) == before


def test_a_level_is_the_same_however_far_the_preparation_went_and_found_with_its_tokenizer(
    small, rows, tmp_path, monkeypatch
):
    prepare(str(rows), 300, tmp_path / "far", tokens=10_000)
    direct = prepare(str(rows), 300, tmp_path / "near", tokens=1)
    assert contents(prepare(str(rows), 300, tmp_path / "far", tokens=1)) == contents(direct)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = [prepare(str(rows), 300, tokens=tokens) for tokens in (5_000, 10_000, 10**9)]
    assert {tokenizer_folder(corpus.fingerprint) for corpus in made} == {Path(made[0].folder)}
    assert (tokenizer_folder(made[0].fingerprint) / "tokenizer.json").is_file()
    assert [known_corpus(corpus.fingerprint) for corpus in made] == made
    assert not tokenizer_folder("0" * 16).exists()
    assert known_corpus("0" * 16) is known_corpus(None) is None


@pytest.mark.parametrize(("tokens", "levels"), [(0, 1), (1 << 23, 1), ((1 << 23) + 1, 2), (2_100_000_000, 256)])
def test_levels_double(tokens, levels):
    assert level_of(tokens) == levels << 23


def test_a_full_disk_is_one_line_and_the_next_run_goes_on(monkeypatch, rows, tmp_path):
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


def test_it_says_how_far_it_is_and_when_it_will_be_done(monkeypatch, small, rows, tmp_path, caplog):
    caplog.set_level("INFO", "nas")
    monkeypatch.setattr("nas.corpus.token_files.LOG_EVERY_S", 0.0)
    prepare(str(rows), 300, tmp_path / "cache", tokens=10_000)
    lines = caplog.messages
    assert lines[0].startswith("training a tokenizer of at most 300 tokens on")
    parts = [re.fullmatch(r"preparing .*: [\d,]+ tokens, (\d+)%, ETA .*", line) for line in lines[1:]]
    shares = [int(part[1]) for part in parts if part]
    assert len(shares) == len(parts)
    assert shares == sorted(shares)
    assert len(shares) > 5
    assert shares[-1] == 100


def encoder(seq_len: int | None = None) -> Encoder:
    documents = [Document("train", f"line {index}\n" * 3) for index in range(20)]
    stream = Stream(split=None, batches=lambda position: (batch for batch in [Batch(documents, 0, None)]))
    return trained_encoder(train_tokenizer(DocumentSource(name="x", fingerprint="", streams=(stream,)), 300), seq_len)


def test_a_long_document_is_encoded_in_pieces_of_whole_lines(monkeypatch):
    text = "".join(f"line {index}\n" for index in range(50)) + "no end"
    (whole,) = encoder().encode([text])
    monkeypatch.setattr("nas.corpus.tokenizer.PIECE_CHARACTERS", 20)
    pieces = encoder().encode(["", text, "line 1"])
    assert [len(ids) for ids in pieces] == [0, len(whole), len(encoder().encode(["line 1"])[0])]
    assert pieces[1].tolist() == whole.tolist()
    assert whole[-1] == encoder().end
    assert encoder().end not in whole[:-1]


@pytest.mark.parametrize("length", [0, 1, 4, 5, 8, 9, 13])
def test_a_document_is_cut_into_sequences_and_their_next_token(length):
    text = "é" * length  # two ids each, no merge
    (whole,), (cut,) = encoder().encode([text]), encoder(seq_len=4).encode([text])
    ids = whole[:-1].tolist()
    assert cut.reshape(-1, 5).tolist() == [ids[at : at + 5] for at in range(0, len(ids) - 4, 4)]


@pytest.mark.parametrize(("vocab_size", "kind"), [(512, np.uint16), (65_536, np.uint16), (65_537, np.uint32)])
def test_ids_are_as_small_as_the_vocabulary_allows(vocab_size, kind):
    assert id_type(vocab_size) == kind


def test_truncation_and_padding_of_a_file_are_switched_off():
    """A call with `max_length` before save_pretrained leaves both in a tokenizer.json."""
    plain = encoder()
    cut = Tokenizer.from_str(plain.tokenizer.to_str())
    cut.enable_truncation(4)
    cut.enable_padding(length=64)
    for text in ("line 1\nline 2\n" * 10, "line"):
        (expected,), (ids,) = plain.encode([text]), trained_encoder(cut.to_str(), None).encode([text])
        assert ids.tolist() == expected.tolist()


SEQ_LEN = 16


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> Corpus:
    """About 30 validation documents, of 10 to 3,000 tokens; those that are trained on are short."""
    folder = tmp_path_factory.mktemp("data")
    for index in range(600):
        name, longest = f"module_{index}.py", index % 7 * index // 3
        count = 1 + longest * (by_hash(name) == "validation")
        (folder / name).write_text("".join(f"value_{index}_{line} = {line * index}\n" for line in range(count)))
    return prepare(str(folder), 300, tmp_path_factory.mktemp("cache"))


def test_every_target_is_known_by_its_document_and_they_are_taken_from_evenly(uneven):
    targets = held_out_targets(uneven, SEQ_LEN, 10**9)
    owners = np.repeat(np.arange(len(uneven.held_out.documents)), [size for _, size in uneven.held_out.documents])
    assert (targets.documents.ravel() == owners[1 : 1 + targets.documents.size]).all()
    some = held_out_targets(uneven, SEQ_LEN, 2_000)
    assert (some.documents == targets.documents[some.indices]).all()
    assert len(some.indices) == 2_000 // SEQ_LEN
    assert (np.diff(some.indices) > 0).all()
    middle = (held_out_targets(uneven, SEQ_LEN, tokens).documents[:, SEQ_LEN // 2 - 1] for tokens in (10**9, 4_000))
    available, taken = (np.bincount(documents, minlength=len(uneven.held_out.documents)) for documents in middle)
    assert (taken <= available).all()
    assert taken.sum() == 4_000 // SEQ_LEN
    assert (taken >= np.minimum(available, taken.max() - 1)).all()


def test_no_document_counts_for_more_than_a_twentieth_or_twice_an_equal_share(uneven):
    shares = held_out_targets(uneven, SEQ_LEN, 10**9).shares
    assert shares.sum() == pytest.approx(1)
    assert shares.max() == pytest.approx(1 / 20)
    # 20 each of 100 and 5 of 4: 25 have room for a twentieth, the small ones share what 100 ones of 5 % leave: nothing
    assert loss_shares(np.array([*[100] * 18, 10, 20, 30])).tolist() == pytest.approx(
        [*[0.05] * 18, 0.1 / 60 * 10, 0.1 / 60 * 20, 0.05]
    )
    assert loss_shares(np.array([5, 5, 0, 5] * 10)).max() == pytest.approx(1 / 30)
    assert loss_shares(np.array([7])).tolist() == [1]
    assert loss_shares(np.array([30, 10])).tolist() == [0.75, 0.25]
    assert loss_shares(np.array([900, 50, 25, 25])).tolist() == pytest.approx([0.5, 0.25, 0.125, 0.125])


def test_the_loss_is_the_mean_of_documents_by_their_shares(uneven):
    targets = held_out_targets(uneven, SEQ_LEN, 3_000)
    sequences = gather(uneven, "validation", targets.indices, SEQ_LEN)[:, 1:].astype(float)
    losses = targets.by_document(sequences)
    for document, (share, loss) in enumerate(losses):
        inside = sequences[targets.documents == document]
        assert share == targets.shares[document]
        assert loss == pytest.approx(inside.mean() if inside.size else 0)
    assert mean_loss(losses) == pytest.approx(sum(share * loss for share, loss in losses))
    assert mean_loss(targets.by_document(np.full_like(sequences, 2.5))) == pytest.approx(2.5)


def test_sequences_that_were_cut_within_documents_belong_to_them(uneven):
    documents = (("a", 2 * (SEQ_LEN + 1)), ("b", SEQ_LEN + 1))
    held_out = replace(uneven.held_out, documents=documents)
    cut = replace(uneven, chunk_len=SEQ_LEN, num_validation_tokens=3 * (SEQ_LEN + 1), held_out=held_out)
    assert held_out_targets(cut, SEQ_LEN, 10**9).documents.tolist() == [[0] * SEQ_LEN] * 2 + [[1] * SEQ_LEN]


# A SentencePiece model, written byte by byte. Languini's books_16384.model gave the ids of sentencepiece 0.2
# for 2,355,907 tokens of English and code.
def message(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, *varint(len(content))]) + content


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def model(*, kind: int = 2, normaliser: bytes = b"identity", leading_space: int = 0) -> bytes:
    pieces = [("<unk>", 0.0, 2), ("<D>", 0.0, 4), *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256))]
    normal = ["ab", "\u2581a", "abc", "\u2581ab", "\u2581\u2581", "a", "b", "c", "\u2581"]
    pieces += [(text, -float(index), 1) for index, text in enumerate(normal)]
    stored = b"".join(
        message(1, message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, type_]))
        for text, score, type_ in pieces
    )
    trainer, normaliser_spec = bytes([0x18, kind]), message(1, normaliser) + bytes([0x18, leading_space])
    return stored + message(2, trainer) + message(3, normaliser_spec)


def test_the_best_pair_is_joined_first_and_what_is_unknown_is_bytes():
    tokenizer = Tokenizer.from_str(to_json(model()))
    assert tokenizer.get_vocab_size() == 267
    text = "ab  abc<D>é ac"
    expected = ["ab", "\u2581\u2581", "abc", "<D>", "<0xC3>", "<0xA9>", "\u2581a", "c"]
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert encoding.tokens == expected
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("raw", "rule"),
    [
        (b"", "whole SentencePiece model"),
        (model()[:-4], "whole SentencePiece model"),
        (model()[:1000], "whole SentencePiece model"),
        (b'{"version": "1.0"}', "whole SentencePiece model"),
        (model(kind=1), "of type BPE"),
        (model(normaliser=b"nmt_nfkc"), "without normalisation"),
        (model(leading_space=1), "leading space"),
    ],
)
def test_another_model_is_refused(raw, rule):
    with pytest.raises(ValueError, match=rule):
        to_json(raw)
