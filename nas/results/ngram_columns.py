"""The floor in tables: what n-gram models reach of the tokens that trials saw. Without n-grams nothing is said."""

from collections.abc import Mapping, Sequence

from nas.corpus.ngrams import NgramBaseline


def ngram_columns(losses: Sequence[float | None], ngrams: NgramBaseline | None) -> Mapping[str, Sequence[object]]:
    """Columns of a table, a value a row: tokens and perplexities of the n-grams, and whether the row's loss is worse.

    losses: nats, of what was trained to the end; None for other rows, of which nothing is said.
    """
    if ngrams is None:
        return {}
    constant = {
        "floor_tokens": ngrams.tokens,
        **{f"floor_{name.replace('-', '')}": value for name, value in ngrams.perplexities.items()},
    }
    return {
        **{name: [value] * len(losses) for name, value in constant.items()},
        "knows_less_than_trigram": [None if loss is None else ngrams.above_trigram(loss) for loss in losses],
    }
