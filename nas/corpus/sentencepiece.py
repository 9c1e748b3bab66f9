"""A SentencePiece BPE model, as Languini's tokenizer is published, turned into a tokenizer of `tokenizers`.

Source: google/sentencepiece, src/sentencepiece_model.proto; field numbers of the protocol buffer below.
"""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from costmodel.errors import UserError

SPACE = "\u2581"
UNKNOWN, USER_DEFINED, NORMAL = 2, 4, 1  # SentencePiece.Type
BPE = 2  # TrainerSpec.ModelType


class Piece(NamedTuple):
    text: str
    score: float
    kind: int


def to_json(model: bytes) -> str:
    """The tokenizer.json of a model without normalisation, such as Languini's.

    Raises UserError if it is damaged, or of another algorithm or normalisation.
    """
    try:
        fields = list(_fields(model))
        pieces = [_piece(value) for number, value in fields if number == 1]
        trainer, normaliser = (dict(_fields(dict(fields)[number])) for number in (2, 3))
    except (LookupError, UnicodeDecodeError, TypeError, struct.error):
        raise UserError("it must be a whole SentencePiece model.") from None
    if trainer.get(3) != BPE or normaliser.get(1) != b"identity" or normaliser.get(3, 1):
        raise UserError("it must be a SentencePiece model of type BPE, without normalisation and leading space.")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece.text: index for index, piece in enumerate(pieces)},
            merges=_merges(pieces),
            unk_token=next((piece.text for piece in pieces if piece.kind == UNKNOWN), None),
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken(piece.text, normalized=False) for piece in pieces if piece.kind == USER_DEFINED])
    return str(tokenizer.to_str())


def _merges(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Every way to join two pieces to a third, the third with the best score first."""
    scores = {piece.text: piece.score for piece in pieces if piece.kind == NORMAL}
    joined = [
        (-score, cut, text) for text, score in scores.items() for cut in range(1, len(text)) if text[:cut] in scores
    ]
    return [(text[:cut], text[cut:]) for _, cut, text in sorted(joined) if text[cut:] in scores]


def _piece(message: bytes) -> Piece:
    fields = dict(_fields(message))
    (score,) = struct.unpack("<f", fields.get(2, bytes(4)))
    return Piece(fields[1].decode("utf-8"), score, fields.get(3, NORMAL))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of the fields of a protocol buffer: an integer, or the bytes of anything else.

    Source: https://protobuf.dev/programming-guides/encoding/
    """
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        size, at = _varint(message, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        if at + size > len(message):
            raise IndexError(at)
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
