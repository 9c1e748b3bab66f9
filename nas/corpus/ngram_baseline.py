"""N-gram baselines: the perplexities of n-gram models of the same training tokens. Cached with the corpus.

A model that has learned something from its context is below the trigram. The hypervolume's reference is another unigram
model, `Corpus.unigram_loss`, of the whole training split.
"""

import json
import logging
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from costmodel.config.files import decode, read_json
from costmodel.errors import UserError
from nas.corpus.corpus import Corpus
from nas.corpus.ngrams import NgramBaseline, kneser_ney
from nas.corpus.sequences import epoch_order, gather, held_out_targets, mean_loss, num_sequences
from nas.storage import replace_file

_log = logging.getLogger(__name__)

FORMAT = 2  # of the cache; raised when numbers change
COUNTED_TOKENS = 1 << 24  # most training tokens that are counted: takes 1.5 GB of memory and 15 seconds


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

    It is of text alone, without the token that begins a text.

    Args:
        tokens: training tokens of a candidate, in whole sequences; None for all. At most 2**24 are counted
            (`NgramBaseline.tokens`), although more would lower the perplexities.
        seed: seed of the training, which draws a part of all tokens; for 524,288 tokens the trigram varies by 4 % over
            four seeds.
        validation_tokens: the scale's. The baseline is computed on the same targets as the candidates, with the same
            weights (`held_out_targets`) and contexts within a sequence, since other parts of a split have other
            perplexities.
        second: another corpus in the same tokens, on whose targets the baseline is computed instead.

    Raises UserError if a split has no sequence.
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
    texts = replace(corpus, begin_of_text=None), replace(scored, begin_of_text=None)
    train, targets = (
        gather(texts[0], "train", order, seq_len),
        gather(texts[1], "validation", held_out.indices, seq_len),
    )
    orders = kneser_ney(train, targets, corpus.vocab_size)
    losses = [mean_loss(held_out.by_document(-np.log(probabilities))) for probabilities in orders]
    ngrams = NgramBaseline(tokens=counted * seq_len, losses=tuple(losses))
    with suppress(OSError):  # another user's cache may be read-only
        replace_file(path, json.dumps(asdict(ngrams)))
    return ngrams
