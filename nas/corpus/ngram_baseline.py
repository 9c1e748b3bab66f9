"""The floor under a candidate's perplexity: what n-gram models of the same tokens reach. Cached beside the corpus.

A model that attends to its whole context and has learned something from it is below its trigram. The unigram of the
floor is of the tokens that were seen, with the same discount as the others; the reference of the hypervolume stays
`Corpus.unigram_loss`, of the whole training split.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np

from costmodel.config.schema import decode
from nas.corpus.corpus import Corpus
from nas.corpus.ngrams import NgramBaseline, kneser_ney
from nas.corpus.sequences import epoch_order, gather, held_out_targets, mean_loss, num_sequences
from nas.storage import replace_file

FORMAT = 2  # of what is computed and cached; raised when numbers change
COUNTED_TOKENS = 1 << 24  # training tokens that are counted at most: 1.5 GB of memory and a quarter of a minute


def ngram_baseline(
    corpus: Corpus,
    *,
    seq_len: int,
    validation_tokens: int,
    tokens: int | None = None,
    seed: int = 0,
    second: Corpus | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> NgramBaseline:
    """The n-gram baseline of candidates trained and validated in sequences of seq_len tokens.

    tokens: training tokens that a candidate has seen, in whole sequences; None, or more than there are: all. At most
        2**24 are counted, which `NgramBaseline.tokens` tells; more would lower the n-grams.
    seed: of the training that draws a part of them; of 524,288 tokens the trigrams of four seeds differ by 4 %.
    validation_tokens: of the scale. The ngrams are over the very targets that candidates are validated on, of the same
        shares (`held_out_targets`), each with the tokens before it in its sequence as context, since perplexities of
        other parts of a split cannot be compared.

    second: another corpus in the same tokens, whose targets they are over instead.

    Raises UserError if a split has no sequence.
    """
    count = num_sequences(corpus, "train", seq_len)
    counted = min(count if tokens is None else -(-tokens // seq_len), count, max(1, COUNTED_TOKENS // seq_len))
    scored = second or corpus
    held_out = held_out_targets(scored, seq_len, validation_tokens)
    drawn = counted if counted == count else f"{counted}-of-seed-{seed}"
    name = f"ngrams-{FORMAT}-{corpus.fingerprint}-{seq_len}-{drawn}-{len(held_out.indices)}"
    path = Path(corpus.folder) / f"{name}{'' if second is None else f'-{second.fingerprint}'}.json"
    with suppress(OSError, ValueError, RecursionError):  # not there, or damaged
        return decode(NgramBaseline, json.loads(path.read_text(encoding="utf-8")), str(path))
    log(f"counting n-grams of {counted * seq_len:,} training tokens")
    order = np.arange(count) if counted == count else epoch_order(seed, 0, count)[:counted]
    orders = kneser_ney(
        gather(corpus, "train", order, seq_len),
        gather(scored, "validation", held_out.indices, seq_len),
        corpus.vocab_size,
    )
    losses = [mean_loss(held_out.by_document(-np.log(probabilities))) for probabilities in orders]
    ngrams = NgramBaseline(tokens=counted * seq_len, losses=tuple(losses))
    with suppress(OSError):  # a cache that only others may write to
        replace_file(path, json.dumps(asdict(ngrams)))
    return ngrams
