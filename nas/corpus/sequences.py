"""A corpus as sequences: how many there are, in which order training draws them, which of them validate."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nas.corpus.corpus import Corpus, require_chunks
from nas.corpus.documents import Split

MOST_OF_LOSS = 1 / 20

DocumentLoss: TypeAlias = tuple[float, float]  # share in the loss, nats per token


def num_sequences(corpus: Corpus, split: Split, seq_len: int) -> int:
    """Sequences of seq_len tokens, each with the token after it, that share no target; as many as there are.

    Raises UserError if the corpus was cut into sequences of another length, or a split holds none.
    """
    require_chunks(corpus, seq_len)
    length = corpus.lengths[split]
    return (length - 1) // seq_len if corpus.chunk_len is None else length // (seq_len + 1)


@lru_cache(maxsize=2)  # a batch spans two epochs at most
def epoch_order(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    """The order in which an epoch draws the `length` training sequences."""
    return np.random.default_rng([seed, epoch]).permutation(length)


class HeldOutTargets(NamedTuple):
    """What validates. indices: of sequences, rising. documents: of each target, sequences x seq_len, by its place in
    `HeldOut.documents`. shares: of each document in the loss, which add up to 1.
    """

    indices: NDArray[np.int64]
    documents: NDArray[np.int64]
    shares: NDArray[np.float64]

    def by_document(self, losses: NDArray[np.floating[Any]]) -> tuple[DocumentLoss, ...]:
        """Share and mean loss of each, 0 of one without a target. losses: of each target, sequences x seq_len."""
        owners = self.documents.ravel()
        sums = np.bincount(owners, losses.ravel(), len(self.shares))
        counts = np.bincount(owners, minlength=len(self.shares))
        return tuple(zip(self.shares.tolist(), (sums / np.maximum(counts, 1)).tolist(), strict=True))


def mean_loss(documents: Iterable[DocumentLoss]) -> float:
    """The loss, nats per token, in which each document has its share."""
    return sum(share * loss for share, loss in documents)


def held_out_targets(corpus: Corpus, seq_len: int, tokens: int) -> HeldOutTargets:
    """About so many tokens in whole sequences, at least one: as many of one document as of another, as far as they go.

    A document counts for its tokens, but for at most MOST_OF_LOSS of all; of fewer documents than can keep to that, for
    at most twice what it would if all were equal. Raises UserError as `num_sequences`.
    """
    count = num_sequences(corpus, "validation", seq_len)
    stride = seq_len if corpus.chunk_len is None else seq_len + 1
    ends = np.cumsum([size for _, size in corpus.held_out.documents])
    middles = np.searchsorted(ends, np.arange(count) * stride + (seq_len + 1) // 2, side="right")
    of_document = [np.flatnonzero(middles == document) for document in range(len(ends))]
    chosen = _evenly([len(sequences) for sequences in of_document], max(1, tokens // seq_len))
    places = [np.arange(few) * len(all_) // max(1, few) for all_, few in zip(of_document, chosen, strict=True)]
    indices = np.concatenate([all_[few] for all_, few in zip(of_document, places, strict=True)])
    documents = np.searchsorted(ends, indices[:, None] * stride + 1 + np.arange(seq_len), side="right")
    return HeldOutTargets(indices, documents, loss_shares(np.bincount(documents.ravel(), minlength=len(ends))))


def loss_shares(sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of each document in the loss, by how many of its tokens validate. See `held_out_targets`."""
    num_documents = np.count_nonzero(sizes)
    most = MOST_OF_LOSS if num_documents * MOST_OF_LOSS >= 1 else min(1.0, 2 / num_documents)
    shares: NDArray[np.float64] = sizes / sizes.sum()
    while (shares > most * (1 + 1e-12)).any():
        full = shares >= most * (1 - 1e-12)
        left = 1 - most * full.sum()
        shares = np.where(full, most, sizes * left / max(1, sizes[~full].sum()))
    return shares


def _evenly(available: Sequence[int], wanted: int) -> list[int]:
    """How many to take of each, together at most `wanted`, so that the largest number is as low as can be."""
    taken, left = [0] * len(available), wanted
    for place, document in enumerate(sorted(range(len(available)), key=lambda index: available[index])):
        taken[document] = min(available[document], -(-left // (len(available) - place)))
        left -= taken[document]
    return taken


def gather(
    corpus: Corpus, split: Split, indices: Sequence[int] | NDArray[np.int64], seq_len: int
) -> NDArray[np.unsignedinteger[Any]]:
    """Sequences of a split, each with the token after it: indices x (seq_len + 1), as they are stored."""
    stride = seq_len if corpus.chunk_len is None else seq_len + 1
    starts = np.asarray(indices, dtype=np.int64) * stride
    sequences: NDArray[np.unsignedinteger[Any]] = sliding_window_view(corpus.tokens(split), seq_len + 1)[starts]
    return sequences
