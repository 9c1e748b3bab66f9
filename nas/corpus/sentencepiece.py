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
MOST_BYTES = 1 << 23  # twice those of the model of 262,144 pieces of Gemma
MOST_CHARACTERS = 128  # of a piece, which may be cut anywhere; the usual limit of a training is 16


class Piece(NamedTuple):
    text: str
    score: float
    kind: int


def to_json(model: bytes) -> str:
    """Return the tokenizer.json of a model without normalisation, such as Languini's.

    Raises UserError if it is damaged, or has another algorithm or normalisation.
    """
    if len(model) > MOST_BYTES:
        raise UserError(f"it must be a SentencePiece model of at most {MOST_BYTES:,} bytes, but has {len(model):,}.")
    try:
        fields = _fields(model)
        pieces = [_piece(data) for number, data in fields if number == 1]
        trainer, normaliser = (dict(_fields(dict(fields)[number])) for number in (2, 3))
    except (DecodeError, LookupError, UnicodeDecodeError, TypeError, AttributeError, struct.error):
        raise UserError("it must be a whole SentencePiece model.") from None
    if trainer.get(3) != BPE or normaliser.get(1) != b"identity" or normaliser.get(3, 1):
        raise UserError("it must be a SentencePiece model of type BPE, without normalisation and leading space.")
    if (longest := max((len(piece.text) for piece in pieces), default=0)) > MOST_CHARACTERS:
        raise UserError(f"its pieces must have at most {MOST_CHARACTERS} characters, but one has {longest:,}.")
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
    fields = dict(_fields(message))
    (score,) = struct.unpack("<f", struct.pack("<I", fields.get(2, 0)))
    return Piece(fields[1].decode("utf-8"), score, fields.get(3, NORMAL))


def _fields(message: bytes) -> list[tuple[int, Any]]:
    """Return number and value of every field of a message: an integer or bytes. Its schema is not needed."""
    return [(field.field_number, field.data) for field in UnknownFieldSet(Empty.FromString(message))]
