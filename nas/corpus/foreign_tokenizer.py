"""Runs a tokenizer.json that somebody else wrote: what it may do with a text is bounded, and its failures are one line.

The package tokenizers runs whatever the file says. A regular expression that gives up is a panic there, which is no
`Exception` and writes a traceback of its own; replacements can make gigabytes of one letter.
"""

import base64
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from threading import RLock
from typing import Any

from tokenizers import Tokenizer

from costmodel.config.files import plain_json
from costmodel.errors import UserError

MOST_GROWTH = 64  # characters that may be made of one; NFKC makes 18, bytes as letters 4
MOST_CHARACTERS = 4096  # of a token; published ones have runs of up to 1,024 spaces or dashes

_stderr = RLock()


@contextmanager
def tokenizing(subject: str) -> Iterator[None]:
    """Turn errors and panics of the tokenizers package into UserErrors, and keep it from writing to stderr."""
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
    """Return the tokenizer of a tokenizer.json. A UserError is raised if it is damaged, or can make texts too long."""
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
    """Return how many characters a step, or a sequence of steps, makes of one at most."""
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
