"""Results of `experiments run smollm2-healing`: the file that holds them, and their tables."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from costmodel.errors import UserError
from experiments.bars import table, write_csv
from experiments.smollm2.tables import score_of, spearman
from nas.run.members import TrainedMember
from nas.training.distillation.sub_layers import BlockScores
from search_spaces.architecture import Architecture

PARENT = "parent"


class Trained(NamedTuple):
    """The result of one training; perplexities are infinite if it diverged, `english` is of the second corpus."""

    name: str
    tokens: int
    seed: int
    batch: int
    learning_rate: float
    trainable: str
    perplexity: float
    english: float
    seconds: float
    placement: str
    candidate_id: str
    corpus: str

    @property
    def line(self) -> str:
        """The result as text."""
        again = f", seed {self.seed}" if self.seed else ""
        rate = f" at {self.learning_rate:.2g}" if self.tokens else ""
        return (
            f"{self.name}, {self.tokens:,} tokens{rate}, batch {self.batch}{again}: perplexity {self.perplexity:.3f}, "
            f"on English {self.english:.3f}; {self.seconds:.1f} s"
        )


def write_results(path: Path, results: Iterable[Trained]) -> None:
    """Write all results, as `read_results` reads them. Raises OSError."""
    rows = ([f"{value:.6g}" if isinstance(value, float) else value for value in one] for one in results)
    write_csv(path, Trained._fields, rows)


def read_results(path: Path) -> list[Trained]:
    """Return the results in a file, none if it does not exist; a UserError is raised for an invalid line."""
    if not path.exists():
        return []
    try:
        with path.open(newline="") as file:
            kinds = Trained.__annotations__
            return [Trained(**{n: kinds[n](value) for n, value in line.items()}) for line in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} must be the results of an experiment, but: {error}.") from None


def best(results: Iterable[Trained]) -> dict[tuple[str, str, int], Trained]:
    """Return the result with the best learning rate for each name, trained part and number of tokens, of seed 0."""
    chosen: dict[tuple[str, str, int], Trained] = {}
    for one in (one for one in results if one.seed == 0):
        place = one.name, one.trainable, one.tokens
        if place not in chosen or one.perplexity < chosen[place].perplexity:
            chosen[place] = one
    return chosen


def tokens_table(results: Sequence[Trained]) -> Table:
    """Tabulate perplexities on both corpora by tokens, relative to the parent, the best of its own row."""
    chosen = best(results)
    parent = min((one for one in results if one.name == PARENT), key=lambda one: one.perplexity)
    lengths = sorted({one.tokens for one in results})
    shown = {(name, part): None for name, part, _ in chosen}

    def cell(one: Trained | None) -> str:
        if one is None:
            return ""
        shares = one.perplexity / parent.perplexity - 1, one.english / parent.english - 1
        return f"{one.perplexity:.2f} ({100 * shares[0]:+.1f} %), {one.english:.2f} ({100 * shares[1]:+.1f} %)"

    rows = [
        (f"{name}, {part} trained", *(cell(chosen.get((name, part, tokens))) for tokens in lengths))
        for name, part in shown
    ]
    columns = ("perplexity, on English", *(f"{tokens:,} tokens" for tokens in lengths))
    return table(columns, rows, title="best learning rate; shares are of the parent's best perplexities")


def score_table(results: Sequence[Trained], scores: BlockScores, base: Architecture) -> Table:
    """Tabulate the sums of block scores and their rank correlation with trained perplexities, by tokens."""
    by_length: dict[tuple[str, int], dict[str, float]] = {}
    for (name, part, tokens), one in best(results).items():
        if name != PARENT:
            by_length.setdefault((part, tokens), {})[one.placement] = one.perplexity
    rows = []
    for (part, tokens), perplexities in sorted(by_length.items()):
        sums = {placement: score_of(scores, placement, base) for placement in perplexities}
        order = "" if len(sums) < 2 else f"{spearman(sums, perplexities):.2f}"
        rows.append((f"{tokens:,} tokens, {part} trained", str(len(sums)), order))
    return table(("Spearman of block scores and perplexities", "placements", ""), rows)


def rank_table(members: Sequence[TrainedMember], scores: BlockScores, base: Architecture) -> Table:
    """Tabulate block scores and trained perplexities of a search, best first, with their rank correlation."""
    perplexities = {one.first.placement: one.perplexity for one in sorted(members, key=lambda one: one.perplexity)}
    sums = {placement: score_of(scores, placement, base) for placement in perplexities}
    rows = [(placement, f"{sums[placement]:.3f}", f"{value:.2f}") for placement, value in perplexities.items()]
    title = f"Spearman {spearman(sums, perplexities):.2f}" if len(sums) > 1 else None
    return table(("placement", "block scores, nats", "perplexity"), rows, title=title)
