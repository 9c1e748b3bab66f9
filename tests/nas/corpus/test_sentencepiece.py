"""A SentencePiece model written here byte by byte, read as SentencePiece reads it.

Languini's books_16384.model gave the ids of the package sentencepiece 0.2 for 2,355,907 tokens of English and code.
"""

import struct

import pytest
from tokenizers import Tokenizer

from nas.corpus.sentencepiece import to_json


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
