"""The block library of a parent: every half layer that a space offers, trained for a moment and scored by itself.

A score is what the parent's predictions lose when one half of one layer is replaced: a few minutes for all of them on a
core, once for a parent, a corpus and the forms of a space; they are kept beside the corpus.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from nas.blocks.halves import BlockScores, Half, halves_of, read, written
from nas.blocks.mimicry import Alternative, Mimicry, trained_alternatives
from nas.conversion.linear_fit import streams_of
from nas.conversion.parent import Parent
from nas.corpus.corpus import Corpus
from nas.corpus.sequences import gather, validation_indices
from nas.model.decoder import Decoder
from nas.storage import replace_file
from search_spaces.architecture import Layer

FORMAT = 1  # of what is computed and cached; raised when numbers change
SCORED_TOKENS = 8_192  # of the validation split: the standard error of most scores is then a few percent
DEFAULT = Mimicry()
TRAINED_SHARE = 0.7  # of the time, about: the rest is scoring


def block_scores(
    parent: Parent,
    layers: Iterable[Layer],
    corpus: Corpus,
    settings: Mimicry = DEFAULT,
    on_progress: Callable[[float], None] = lambda share: None,
) -> BlockScores:
    """Scores of the halves of these layers at every depth of the parent; from the cache, if they are there.

    on_progress: told the share of the work that is done. Raises UserError if the corpus is too short.
    """
    own = parent.model.architecture
    wanted = sorted(
        {half for layer in layers for depth in range(own.num_layers) for half in halves_of(own, depth, layer)}
    )
    path = Path(corpus.folder) / f"blocks-{FORMAT}-{parent.digest}-{corpus.fingerprint}-{_digest(wanted, settings)}.csv"
    with suppress(FileNotFoundError):
        kept = read(path.read_text(encoding="utf-8"), str(path))
        if kept.divergences.keys() >= set(wanted):  # not cut off
            return kept
    known = {half for depth, layer in enumerate(own.layers) for half in halves_of(own, depth, layer)}
    others = [half for half in wanted if half not in known]
    trained = trained_alternatives(parent, others, corpus, settings, lambda share: on_progress(TRAINED_SHARE * share))
    tokens = scored_tokens(corpus, own.context)
    scores = dict.fromkeys(known & set(wanted), 0.0)
    streams = Streams(parent.decoder(), tokens)
    for index, alternative in enumerate(trained):
        scores |= streams.divergences(alternative)
        on_progress(TRAINED_SHARE + (1 - TRAINED_SHARE) * (index + 1) / len(trained))
    found = BlockScores(divergences=scores)
    with suppress(OSError):  # a cache that only others may write to
        replace_file(path, written(found))
    return found


class Streams:
    """The parent on the tokens that scores are taken on. tokens: sequences x T."""

    def __init__(self, model: Decoder, tokens: Tensor) -> None:
        self.model = model
        self.streams = streams_of(model, tokens)
        self.predicted = self._log_probabilities(self.streams[-1])

    @torch.no_grad()
    def divergences(self, alternative: Alternative) -> dict[Half, float]:
        """KL(parent || parent with one half replaced), of every half of an alternative, nats per token."""
        found = {}
        for half in alternative.halves:
            stream, _ = alternative.model.eval().layers[half.depth](self.streams[half.depth], False)
            for layer in self.model.layers[half.depth + 1 :]:
                stream, _ = layer(stream, False)
            own = self._log_probabilities(stream)
            divergence = functional.kl_div(own, self.predicted, reduction="sum", log_target=True)
            found[half] = float(divergence) / own.shape[:-1].numel()
        return found

    @torch.no_grad()
    def _log_probabilities(self, stream: Tensor) -> Tensor:
        logits: Tensor = self.model.logits(self.model.final_norm(stream))
        return logits.log_softmax(dim=-1)


def scored_tokens(corpus: Corpus, seq_len: int) -> Tensor:
    """What scores are taken on, sequences x seq_len. Raises UserError if the corpus is too short."""
    sequences = gather(corpus, "validation", validation_indices(corpus, seq_len, SCORED_TOKENS), seq_len)
    return torch.from_numpy(sequences[:, :-1].astype("int64"))


def _digest(wanted: list[Half], settings: Mimicry) -> str:
    return sha256(repr((wanted, settings, SCORED_TOKENS)).encode()).hexdigest()[:12]
