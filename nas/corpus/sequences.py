"""A corpus as sequences: how many there are, in which order training draws them, which of them validate."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nas.corpus.corpus import Corpus, require_chunks
from nas.corpus.documents import Split


def num_sequences(corpus: Corpus, split: Split, seq_len: int) -> int:
    """Sequences of seq_len tokens, each with the token after it, that share no target; as many as there are.

    Raises UserError if the corpus was cut into sequences of another length, or a split holds none.
    """
    require_chunks(corpus, seq_len)
    length = corpus.num_train_tokens if split == "train" else corpus.num_validation_tokens
    return (length - 1) // seq_len if corpus.chunk_len is None else length // (seq_len + 1)


@lru_cache(maxsize=2)  # a batch spans two epochs at most
def epoch_order(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    """The order in which an epoch draws the `length` training sequences."""
    return np.random.default_rng([seed, epoch]).permutation(length)


def validation_indices(corpus: Corpus, seq_len: int, tokens: int) -> list[int]:
    """Sequences with about so many tokens, at least one sequence, spread evenly over the validation split.

    Raises UserError as `num_sequences`.
    """
    count = num_sequences(corpus, "validation", seq_len)
    wanted = max(1, min(count, tokens // seq_len))
    return [index * count // wanted for index in range(wanted)]


def gather(
    corpus: Corpus, split: Split, indices: Sequence[int] | NDArray[np.int64], seq_len: int
) -> NDArray[np.unsignedinteger[Any]]:
    """Sequences of a split, each with the token after it: indices x (seq_len + 1), as they are stored."""
    stride = seq_len if corpus.chunk_len is None else seq_len + 1
    starts = np.asarray(indices, dtype=np.int64) * stride
    sequences: NDArray[np.unsignedinteger[Any]] = sliding_window_view(corpus.tokens(split), seq_len + 1)[starts]
    return sequences
