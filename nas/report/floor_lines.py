"""The floor in words: what n-gram models of a run's training tokens reach, and who knows less than one of them."""

from nas.corpus.ngrams import TRIGRAM, NgramFloors

KNOWS_LESS = "knows less than a trigram"


def floor_lines(floors: NgramFloors | None) -> list[str]:
    """One line with the perplexities of all orders; none for a run from before there were floors."""
    if floors is None:
        return []
    reached = ", ".join(f"{name} {perplexity:.4g}" for name, perplexity in floors.perplexities.items())
    return [f"floor, perplexity of n-gram models of {floors.tokens:,} training tokens: {reached}"]


def mark(loss: float, floors: NgramFloors | None) -> str:
    """What is said of a loss, in nats, above that of the trigram, whose context is two tokens; empty for the others."""
    return KNOWS_LESS if floors is not None and floors.above_trigram(loss) else ""


def beside_trigram(perplexity: float | None, floors: NgramFloors | None) -> str:
    """A perplexity, or - for none, with the trigram's after it."""
    text = "-" if perplexity is None else f"{perplexity:.2f}"
    return text if floors is None else f"{text} (trigram {floors.perplexity(TRIGRAM):.2f})"
