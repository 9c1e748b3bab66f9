"""Encoding: long documents in pieces, ids in the smallest type."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from nas.corpus.documents import Batch, Document, DocumentSource, Stream
from nas.corpus.tokenizer import Encoder, id_type, train_tokenizer, trained_encoder


def encoder(seq_len: int | None = None) -> Encoder:
    documents = [Document("train", f"line {index}\n" * 3) for index in range(20)]
    stream = Stream(split=None, batches=lambda position: (batch for batch in [Batch(documents, 0, None)]))
    return trained_encoder(train_tokenizer(DocumentSource(name="x", fingerprint="", streams=(stream,)), 300), seq_len)


def test_a_long_document_is_encoded_in_pieces_of_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {index}\n" for index in range(50)) + "no end"
    (whole,) = encoder().encode([text])
    monkeypatch.setattr("nas.corpus.tokenizer.PIECE_CHARACTERS", 20)
    pieces = encoder().encode(["", text, "line 1"])
    assert [len(ids) for ids in pieces] == [0, len(whole), len(encoder().encode(["line 1"])[0])]
    assert pieces[1].tolist() == whole.tolist()
    assert whole[-1] == encoder().end
    assert encoder().end not in whole[:-1]


@pytest.mark.parametrize("length", [0, 1, 4, 5, 8, 9, 13])
def test_a_document_is_cut_into_sequences_and_their_next_token(length: int) -> None:
    text = "é" * length  # two ids each, no merge
    (whole,), (cut,) = encoder().encode([text]), encoder(seq_len=4).encode([text])
    ids = whole[:-1].tolist()
    assert cut.reshape(-1, 5).tolist() == [ids[at : at + 5] for at in range(0, len(ids) - 4, 4)]


@pytest.mark.parametrize(("vocab_size", "kind"), [(512, np.uint16), (65_536, np.uint16), (65_537, np.uint32)])
def test_ids_are_as_small_as_the_vocabulary_allows(vocab_size: int, kind: type) -> None:
    assert id_type(vocab_size) == kind


def test_truncation_and_padding_of_a_file_are_switched_off() -> None:
    """A call with `max_length` before save_pretrained leaves both in a tokenizer.json."""
    plain = encoder()
    cut = Tokenizer.from_str(plain.tokenizer.to_str())
    cut.enable_truncation(4)
    cut.enable_padding(length=64)
    for text in ("line 1\nline 2\n" * 10, "line"):
        (expected,), (ids,) = plain.encode([text]), trained_encoder(cut.to_str(), None).encode([text])
        assert ids.tolist() == expected.tolist()
