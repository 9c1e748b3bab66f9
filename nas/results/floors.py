"""Trials against the floor: what n-gram models reach of the tokens that they saw. Without floors nothing is said."""

from collections.abc import Callable, Mapping

from nas.corpus.ngrams import NgramFloors
from nas.results.ledger import Record


def knows_less_than_trigram(record: Record, floors: NgramFloors | None) -> bool:
    """Whether a trained trial predicts worse than the trigram, whose context is two tokens."""
    if floors is None or record.val_loss is None or record.status != "completed":
        return False
    return floors.above_trigram(record.val_loss)


def floor_columns(floors: NgramFloors | None) -> Mapping[str, Callable[[Record], object]]:
    """Columns of a table of trials: tokens and perplexities of the floors, and whether a completed trial is worse."""
    if floors is None:
        return {}

    def constant(value: object) -> Callable[[Record], object]:
        return lambda record: value

    perplexities = {f"floor_{name.replace('-', '')}": constant(value) for name, value in floors.perplexities.items()}
    return {
        "floor_tokens": constant(floors.tokens),
        **perplexities,
        "knows_less_than_trigram": lambda one: (
            None if one.status != "completed" else knows_less_than_trigram(one, floors)
        ),
    }
