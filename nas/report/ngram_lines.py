"""The floor in words: what n-gram models of a run's training tokens reach, and who knows less than one of them."""

from nas.corpus.ngrams import TRIGRAM, NgramBaseline

KNOWS_LESS = "knows less than a trigram"


def ngram_lines(ngrams: NgramBaseline | None) -> list[str]:
    """One line with the perplexities of all orders; none for a run without one."""
    if ngrams is None:
        return []
    reached = ", ".join(f"{name} {perplexity:.4g}" for name, perplexity in ngrams.perplexities.items())
    return [f"floor, perplexity of n-gram models of {ngrams.tokens:,} training tokens: {reached}"]


def mark(loss: float, ngrams: NgramBaseline | None) -> str:
    """What is said of a loss, in nats, above that of the trigram, whose context is two tokens; empty for the others."""
    return KNOWS_LESS if ngrams is not None and ngrams.above_trigram(loss) else ""


def beside_trigram(perplexity: float | None, ngrams: NgramBaseline | None) -> str:
    """A perplexity, or - for none, with the trigram's after it."""
    text = "-" if perplexity is None else f"{perplexity:.2f}"
    return text if ngrams is None else f"{text} (trigram {ngrams.perplexity(TRIGRAM):.2f})"
