"""Validation tokens for a model: of the corpus that it was trained on, or of other data in its own tokens."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodel.errors import UserError
from nas.corpus.corpus import Corpus, known_corpus, prepare
from nas.corpus.documents import GivenTokenizer
from nas.corpus.sequences import gather, validation_indices

DEFAULT_DATA = "stdlib"

Tokens = NDArray[np.unsignedinteger[Any]]


def corpus_for(
    tokenizer: GivenTokenizer, fingerprint: str | None, data: str | None, *, vocab_size: int, context: int
) -> Corpus:
    """The corpus of a model, else `data` or the default one in its tokens. Raises UserError as `prepare`."""
    known = known_corpus(fingerprint) if data is None else None
    return known or prepare(data or DEFAULT_DATA, vocab_size, seq_len=context, tokenizer=tokenizer)


def validation_sequences(corpus: Corpus, num_tokens: int, context: int) -> Tokens:
    """So many tokens, or a few less, in whole sequences spread over the split, each with the token after it.

    Returns sequences x (length + 1). Raises UserError for less than a token, or a split too small.
    """
    if num_tokens < 1:
        raise UserError(f"--perplexity must be at least 1 token, but got {num_tokens}.")
    length = min(context, num_tokens)
    return gather(corpus, "validation", validation_indices(corpus, length, num_tokens), length)
