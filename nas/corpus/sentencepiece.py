"""Converts a SentencePiece BPE model, such as the published tokenizer of Languini, for `tokenizers`.

Source: google/sentencepiece, src/sentencepiece_model.proto; the numbers below are its field numbers.
"""

import struct
from typing import Any, NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
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
    """Return the tokenizer.json of a model without normalisation, such as Languini's.

    Raises UserError if it is damaged, or has another algorithm or normalisation.
    """
    try:
        pieces = [_piece(field.data) for field in UnknownFieldSet(Empty.FromString(model)) if field.field_number == 1]
        trainer, normaliser = (_fields(_fields(model)[number]) for number in (2, 3))
    except (DecodeError, LookupError, UnicodeDecodeError, TypeError, AttributeError, struct.error):
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
    """List all pairs of pieces that form a third one, in order of its score."""
    scores = {piece.text: piece.score for piece in pieces if piece.kind == NORMAL}
    joined = [
        (-score, cut, text) for text, score in scores.items() for cut in range(1, len(text)) if text[:cut] in scores
    ]
    return [(text[:cut], text[cut:]) for _, cut, text in sorted(joined) if text[cut:] in scores]


def _piece(message: bytes) -> Piece:
    fields = _fields(message)
    (score,) = struct.unpack("<f", struct.pack("<I", fields.get(2, 0)))
    return Piece(fields[1].decode("utf-8"), score, fields.get(3, NORMAL))


def _fields(message: bytes) -> dict[int, Any]:
    """Return the last value of every field of a message, by number: an integer or bytes. Its schema is not needed."""
    return {field.field_number: field.data for field in UnknownFieldSet(Empty.FromString(message))}
