"""The floor in tables: what n-gram models reach of the tokens that trials saw. Without floors nothing is said."""

from collections.abc import Mapping, Sequence

from nas.corpus.ngrams import NgramFloors


def floor_columns(losses: Sequence[float | None], floors: NgramFloors | None) -> Mapping[str, Sequence[object]]:
    """Columns of a table, a value a row: tokens and perplexities of the floors, and whether the row's loss is worse.

    losses: nats, of what was trained to the end; None for other rows, of which nothing is said.
    """
    if floors is None:
        return {}
    constant = {
        "floor_tokens": floors.tokens,
        **{f"floor_{name.replace('-', '')}": value for name, value in floors.perplexities.items()},
    }
    return {
        **{name: [value] * len(losses) for name, value in constant.items()},
        "knows_less_than_trigram": [None if loss is None else floors.above_trigram(loss) for loss in losses],
    }
