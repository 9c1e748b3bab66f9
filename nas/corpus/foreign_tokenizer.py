"""Runs a tokenizer.json that somebody else wrote: bounds how much it can lengthen a text, and reports failures briefly.

The package tokenizers runs whatever the file says. A regular expression that gives up is a panic there, which is no
`Exception` and writes a traceback of its own. Replacements can make gigabytes of one letter.

A SentencePiece BPE model, such as the published tokenizer of Languini, is converted. Source: google/sentencepiece,
src/sentencepiece_model.proto, whose field numbers are the numbers below.
"""

import base64
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from threading import RLock
from typing import Any, NamedTuple

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from costmodel.config.files import plain_json
from costmodel.errors import UserError

MOST_GROWTH = 64  # characters that may be made of one; NFKC makes 18, bytes as letters 4
MOST_CHARACTERS = 4096  # of a token; published ones have runs of up to 1,024 spaces or dashes

_stderr = RLock()
SPACE = "\u2581"
UNKNOWN, USER_DEFINED, NORMAL = 2, 4, 1  # SentencePiece.Type
BPE = 2  # TrainerSpec.ModelType
MOST_BYTES = 1 << 23  # twice those of the model of 262,144 pieces of Gemma
MOST_PIECE_CHARACTERS = 128  # of a piece, which may be cut anywhere; the usual limit of a training is 16


@contextmanager
def tokenizing(subject: str) -> Iterator[None]:
    """Turn what a block raises, even a panic, into a UserError about `subject`; discard what it writes to stderr.

    UserError, KeyboardInterrupt and MemoryError pass unchanged.
    """
    with _stderr:
        sys.stderr.flush()
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        try:
            yield
        except (UserError, KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:
            reason = f"{' '.join(str(error).split()):.200}".rstrip(".")
            raise UserError(f"{subject} must be a whole tokenizer.json that can be run, but: {reason}.") from None
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nowhere)


def read_foreign_tokenizer(json: str, subject: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json. json: the file's text. subject: name of the tokenizer in messages.

    Raises UserError if it is damaged, may make over MOST_GROWTH characters of one, or has a token over MOST_CHARACTERS.
    """
    rule = f"{subject} must be a whole tokenizer.json"
    data = plain_json(json, rule)
    if not isinstance(data, dict):
        raise UserError(f"{rule}, but is {data!r:.80}.")
    with tokenizing(subject):
        made = Tokenizer.from_str(json)
        grown = [_growth(data.get("normalizer")) * _growth(data.get("pre_tokenizer")), _growth(data.get("decoder"))]
        affixes = [value for value in data["model"].values() if isinstance(value, str)]
        longest = max(map(len, (*affixes, *made.get_vocab())), default=0)
    if max(grown) > MOST_GROWTH or longest > MOST_CHARACTERS:
        raise UserError(
            f"{subject} must make at most {MOST_GROWTH} characters of one and have tokens of at most "
            f"{MOST_CHARACTERS:,}, but makes up to {max(grown):.3g} and has one of {longest:,}."
        )
    return made


def _growth(part: Any) -> float:
    """Return how many characters a step of a tokenizer.json, or a sequence of steps, makes of one at most."""
    if part is None:
        return 1
    for name in ("normalizers", "pretokenizers", "decoders"):
        if name in part:
            return min(float("inf"), prod(map(_growth, part[name]), start=1.0))
    if part["type"] == "Replace":
        found, made = part["pattern"].get("String"), len(part["content"])
        return max(1.0, made / len(found)) if found else 1.0 + made  # an expression may match between all characters
    if part["type"] == "Precompiled":  # the texts follow the table of characters, whose size comes first
        charsmap = base64.b64decode(part["precompiled_charsmap"])
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        return max(map(len, texts))
    return {"ByteLevel": 4, "Prepend": len(part.get("prepend", ""))}.get(part["type"], 1) or 1


class Piece(NamedTuple):
    """A token of a SentencePiece model. score: high scores are merged first. kind: number of its SentencePiece.Type."""

    text: str
    score: float
    kind: int


def to_json(model: bytes) -> str:
    """Return the tokenizer.json of a SentencePiece BPE model without normalisation, such as Languini's.

    model: content of the file. Raises UserError if it is damaged or too large, uses another algorithm, normalises text
    or adds a leading space, or has too long a piece.
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
    if (longest := max((len(piece.text) for piece in pieces), default=0)) > MOST_PIECE_CHARACTERS:
        raise UserError(f"its pieces must have at most {MOST_PIECE_CHARACTERS} characters, but one has {longest:,}.")
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
    """List all pairs of pieces that form a third one, the highest score of the third first."""
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
