"""A corpus as sequences: their number, the order in which training draws them, and those for validation."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nas.corpus.corpus import Corpus, require_chunks
from nas.corpus.documents import Split

MOST_OF_LOSS = 1 / 20  # greatest weight of a document in the validation loss

DocumentLoss: TypeAlias = tuple[float, float]  # share of the loss, nats per token


def num_sequences(corpus: Corpus, split: Split, seq_len: int) -> int:
    """Return how many sequences a split has. Each is seq_len tokens and the token after them; no two share a target.

    Raises UserError as `require_chunks`.
    """
    require_chunks(corpus, seq_len)
    length = corpus.lengths[split]
    return (length - 1) // seq_len if corpus.chunk_len is None else length // (seq_len + 1)


@lru_cache(maxsize=2)  # a batch spans at most two epochs
def epoch_order(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    """Return a permutation: the order in which an epoch, numbered from 0, goes through `length` training sequences."""
    return np.random.default_rng([seed, epoch]).permutation(length)


class HeldOutTargets(NamedTuple):
    """Validation targets.

    indices: indices of their sequences, ascending, as `gather` takes them. documents: index in `HeldOut.documents` of
        each target, sequences x seq_len. shares: weight of each document in the loss; the weights add up to 1.
    """

    indices: NDArray[np.int64]
    documents: NDArray[np.int64]
    shares: NDArray[np.float64]

    def by_document(self, losses: NDArray[np.floating[Any]]) -> tuple[DocumentLoss, ...]:
        """Return each document's weight and mean loss, both 0 without a target. losses: sequences x seq_len, nats."""
        owners = self.documents.ravel()
        sums = np.bincount(owners, losses.ravel(), len(self.shares))
        counts = np.bincount(owners, minlength=len(self.shares))
        return tuple(zip(self.shares.tolist(), (sums / np.maximum(counts, 1)).tolist(), strict=True))


def mean_loss(documents: Iterable[DocumentLoss]) -> float:
    """Return the loss, nats per token, as the weighted mean over documents."""
    return sum(share * loss for share, loss in documents)


def held_out_targets(corpus: Corpus, seq_len: int, tokens: int) -> HeldOutTargets:
    """Return about `tokens` validation targets, in whole sequences that are spread evenly over documents.

    A document's weight is its share of the targets, but at most MOST_OF_LOSS or, if there are too few documents for
    that, twice the weight of equal shares. Other documents share the rest. Raises UserError as `require_chunks`.
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
    """Return the weight of each document in the loss, as in `held_out_targets`. sizes: number of targets of each."""
    num_documents = np.count_nonzero(sizes)
    most = MOST_OF_LOSS if num_documents * MOST_OF_LOSS >= 1 else min(1.0, 2 / num_documents)
    shares: NDArray[np.float64] = sizes / sizes.sum()
    while (shares > most * (1 + 1e-12)).any():
        full = shares >= most * (1 - 1e-12)
        left = 1 - most * full.sum()
        shares = np.where(full, most, sizes * left / max(1, sizes[~full].sum()))
    return shares


def _evenly(available: Sequence[int], wanted: int) -> list[int]:
    """Return how many to take of each, at most `wanted` in all, so that the largest number is as small as possible."""
    taken, left = [0] * len(available), wanted
    for place, document in enumerate(sorted(range(len(available)), key=lambda index: available[index])):
        taken[document] = min(available[document], -(-left // (len(available) - place)))
        left -= taken[document]
    return taken


def gather(
    corpus: Corpus, split: Split, indices: Sequence[int] | NDArray[np.int64], seq_len: int
) -> NDArray[np.unsignedinteger[Any]]:
    """Return sequences of a split, each with the token after it: indices x (seq_len + 1), in the stored type.

    `Corpus.begin_of_text`, if not None, replaces the first token of each sequence, which is no target.
    """
    stride = seq_len if corpus.chunk_len is None else seq_len + 1
    starts = np.asarray(indices, dtype=np.int64) * stride
    sequences: NDArray[np.unsignedinteger[Any]] = sliding_window_view(corpus.tokens(split), seq_len + 1)[starts]
    if corpus.begin_of_text is not None:
        corpus.begin_of_text.set_in(sequences)
    return sequences
