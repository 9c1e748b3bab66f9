"""N-gram models: interpolated Kneser-Ney of orders 1 to 5, as functions of arrays.

    P_n(w | h) = (max(c(h w) - D, 0) + D t(h) P_(n-1)(w | h')) / c(h)

h are the n - 1 tokens before w, and h' is h without its first token. c(h) is the sum of c(h w) over w, and t(h) is the
number of w with c(h w) > 0. For the highest order, c counts n-grams; for a lower one, it counts the distinct tokens
before an n-gram. Below order 1 all tokens are equally likely, so that none has probability 0. After a context that was
never seen, P_n is P_(n-1).

Source: Kneser and Ney 1995, "Improved backing-off for m-gram language modeling"; Chen and Goodman 1998, "An empirical
study of smoothing techniques for language modeling", TR-10-98, for the interpolated form. They estimate the discount,
which is fixed here.
"""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from costmodel.config.files import decode, read_json
from costmodel.errors import UserError
from nas.corpus.corpus import Corpus
from nas.corpus.sequences import epoch_order, gather, held_out_targets, mean_loss, num_sequences
from nas.storage import replace_file

DISCOUNT = 0.75  # D: how much rarer bigrams are in held-out news than in training news, Church and Gale 1991
NAMES = ("unigram", "bigram", "trigram", "4-gram", "5-gram")
TRIGRAM = 3

MOST_LOSS = 700.0  # nats; the exponential is still finite

Tokens = NDArray[np.integer[Any]]
_log = logging.getLogger(__name__)

FORMAT = 2  # of the cache; raised when numbers change
COUNTED_TOKENS = 1 << 24  # most training tokens that are counted: takes 1.5 GB of memory and 15 seconds


def require_losses(of: str, *losses: float | None) -> None:
    """Raise UserError unless each loss, nats per token, is None or from about 0 to MOST_LOSS. of: model in messages."""
    for loss in losses:
        if loss is not None and not -0.01 <= loss <= MOST_LOSS:  # rounding may make 0 negative
            raise UserError(f"the loss of {of} must be from 0 to {MOST_LOSS:g} nats per token, but got {loss!r:.80}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class NgramBaseline:
    """N-gram models of a candidate's training tokens, evaluated on its validation tokens or on a second corpus.

    tokens: number of training tokens counted. losses: those of orders 1 to 5, nats per token.
    """

    tokens: int
    losses: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.losses) != len(NAMES):
            raise UserError(f"`losses` must be one of each order, {len(NAMES)}, but got {len(self.losses)}.")
        require_losses("n-gram models", *self.losses)

    def perplexity(self, order: int) -> float:
        """Return exp(loss) of an order from 1 to 5."""
        return math.exp(self.losses[order - 1])

    def above_trigram(self, loss: float) -> bool:
        """Whether a loss, nats per token, is worse than the trigram's."""
        return loss > self.losses[TRIGRAM - 1]

    @property
    def perplexities(self) -> dict[str, float]:
        """Perplexities by name, lowest order first."""
        return {name: self.perplexity(order) for order, name in enumerate(NAMES, 1)}


def kneser_ney(train: Tokens, held_out: Tokens, vocab_size: int) -> Iterator[NDArray[np.float64]]:
    """Yield the probability of every held-out target for each order from 1 to 5: rows x (columns - 1).

    train, held_out: rows of token ids below `vocab_size`, which is at most 2**32; at least 1 row x 2 columns, the same
        number of columns in both. All but the first token of a row are targets. Contexts do not cross the start of a
        row, so that targets near the start use the longest order that fits.
    """
    ids, held_ids = train.astype(np.int64), held_out.astype(np.int64)  # of the n-gram that ends at each place
    counts = np.bincount(train[:, 1:].ravel(), minlength=vocab_size)
    grams = _Grams(counts=counts, contexts=np.zeros(vocab_size, dtype=np.int64), num_contexts=1)
    asked, contexts = held_ids[:, 1:], np.zeros_like(held_ids[:, 1:])  # wanted n-grams by id, -1 if never seen
    probabilities = np.full(asked.shape, 1 / vocab_size)
    lower = probabilities.copy()  # of order n - 1 by context, at the targets of order n
    for order in range(1, len(NAMES) + 1):
        probabilities[:, max(0, order - 2) :] = _interpolated(grams, asked, contexts, lower)
        yield probabilities.copy()
        if order == len(NAMES):
            return
        codes, ids, counts, continuations = _extended(ids, train[:, order:], vocab_size, len(grams.counts))
        lower = _interpolated(grams._replace(counts=continuations), asked, contexts, lower)[:, min(1, order - 1) :]
        grams = _Grams(counts=counts, contexts=codes // vocab_size, num_contexts=len(grams.counts))
        contexts = held_ids[:, :-1]
        wanted = np.where(contexts < 0, -1, contexts * vocab_size + held_out[:, order:])
        places = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
        asked = held_ids = np.where(codes[places] == wanted, places, -1)


class _Grams(NamedTuple):
    """The n-grams of an order by id: their counts, and the ids of their contexts."""

    counts: NDArray[np.int64]
    contexts: NDArray[np.int64]
    num_contexts: int


def _interpolated(
    grams: _Grams, asked: NDArray[np.int64], contexts: NDArray[np.int64], lower: NDArray[np.float64]
) -> NDArray[np.float64]:
    totals = np.append(np.bincount(grams.contexts, grams.counts, grams.num_contexts), 0)
    kinds = np.append(np.bincount(grams.contexts, grams.counts > 0, grams.num_contexts), 0)
    discounted = np.append(np.maximum(grams.counts - DISCOUNT, 0), 0)  # the last value is for id -1
    total = totals[contexts]
    seen = discounted[asked] + DISCOUNT * kinds[contexts] * lower
    return np.divide(seen, total, out=lower.copy(), where=total > 0)


def _extended(
    ids: NDArray[np.int64], tokens: Tokens, vocab_size: int, num_ids: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Extend the order by one: distinct n-grams, their places and counts, and continuation counts of shorter ones.

    ids: of the shorter ones, rows x (columns of tokens + 1). An n-gram's code is id of its context * vocab_size + its
        token, below 2**63 for up to 2**31 ids; its own id is its rank among the codes.
    """
    codes = (ids[:, :-1] * vocab_size + tokens).ravel()
    order = np.argsort(codes)
    codes = codes[order]
    is_first = np.ones(len(codes), dtype=bool)
    is_first[1:] = codes[1:] != codes[:-1]
    places = np.empty(len(codes), dtype=np.int64)
    places[order] = np.cumsum(is_first) - 1
    firsts = np.flatnonzero(is_first)
    counts = np.diff(firsts, append=len(codes))
    ends = ids[:, 1:].ravel()[order[firsts]]
    return codes[firsts], places.reshape(tokens.shape), counts, np.bincount(ends, minlength=num_ids)


def ngram_baseline(
    corpus: Corpus,
    *,
    seq_len: int,
    validation_tokens: int,
    tokens: int | None = None,
    seed: int = 0,
    second: Corpus | None = None,
) -> NgramBaseline:
    """Return the n-gram baseline of candidates trained and validated in sequences of seq_len tokens.

    Sequences are taken without the token that begins a text (`Corpus.begin_of_text`). The result is cached with the
    corpus. `Corpus.unigram_loss`, the reference of the hypervolume, is of another unigram model of all training tokens.

    Args:
        validation_tokens: those of the recipe's scale. The targets and their weights (`held_out_targets`) are those of
            the candidates, since other parts of a split have other perplexities.
        tokens: training tokens of a candidate, rounded up to whole sequences; None for all. At most 2**24 of them are
            counted (`NgramBaseline.tokens`), although more would lower the perplexities.
        seed: seed of the training, which decides the tokens that it sees if it does not see all.
        second: corpus of the same tokenizer, whose validation targets are used instead; None for those of `corpus`.

    Raises UserError as `require_chunks`, for either corpus.
    """
    count = num_sequences(corpus, "train", seq_len)
    counted = min(count if tokens is None else -(-tokens // seq_len), count, max(1, COUNTED_TOKENS // seq_len))
    scored = second or corpus
    held_out = held_out_targets(scored, seq_len, validation_tokens)
    drawn = counted if counted == count else f"{counted}-of-seed-{seed}"
    name = f"ngrams-{FORMAT}-{corpus.fingerprint}-{seq_len}-{drawn}-{len(held_out.indices)}"
    path = Path(corpus.folder) / f"{name}{'' if second is None else f'-{second.fingerprint}'}.json"
    with suppress(UserError):  # missing or damaged
        return decode(NgramBaseline, read_json(path), str(path))
    _log.info(f"counting n-grams of {counted * seq_len:,} training tokens")
    order = np.arange(count) if counted == count else epoch_order(seed, 0, count)[:counted]
    train = gather(replace(corpus, begin_of_text=None), "train", order, seq_len)
    targets = gather(replace(scored, begin_of_text=None), "validation", held_out.indices, seq_len)
    orders = kneser_ney(train, targets, corpus.vocab_size)
    losses = [mean_loss(held_out.by_document(-np.log(probabilities))) for probabilities in orders]
    ngrams = NgramBaseline(tokens=counted * seq_len, losses=tuple(losses))
    with suppress(OSError):  # another user's cache may be read-only
        replace_file(path, json.dumps(asdict(ngrams)))
    return ngrams
