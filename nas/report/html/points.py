"""The points that a page prices: the trained members of a run, its parent, and the papers' rows of the same size."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from costmodel.protocols.published_rows import PublishedRow, held_out_rows, published_rows
from nas.report.summary import perplexity_text
from nas.run.members import TrainedMember
from nas.run.pareto import ranks
from nas.run.run import Run
from search_spaces.architecture import Architecture
from search_spaces.deployed import deployed
from search_spaces.notation import parse

MOST_DOMINATED = 60  # members behind the front; of more, those nearest to it

PointRole = Literal["front", "dominated", "baseline", "parent", "paper"]


class Point(NamedTuple):
    """One architecture with a price. number: of a member of the front, from 1, cheapest first; else 0.

    architecture: what the price is of. perplexity: of this run; None for rows that it has not trained.
    printed, printed_s: a paper's perplexity, of its own scale, tokenizer and corpus, and its seconds a token.
    """

    name: str
    role: PointRole
    number: int
    architecture: Architecture
    perplexity: float | None
    member: TrainedMember | None = None
    printed: float | None = None
    printed_s: float | None = None


def points_of(run: Run) -> tuple[Point, ...]:
    """The front first, cheapest first; then what is behind it, baselines, the parent and the papers' rows."""
    numbers = {member.candidate_id: place for place, member in enumerate(run.front, 1)}
    behind = [member for member in run.members if member.candidate_id not in numbers]
    others = [member for member in behind if member.role != "baseline"]
    baselines = [member for member in behind if member.role == "baseline"]
    trained = [*run.front, *_nearest(others), *baselines]
    of_parent = []
    if (parent := run.parent) is not None:
        of_parent.append(Point(parent.notation, "parent", 0, _accounted(run, parent.notation), parent.perplexity))
    return (
        *(_trained(run, member, numbers.get(member.candidate_id, 0)) for member in trained),
        *of_parent,
        *(
            Point(
                row.notation,
                "paper",
                0,
                _accounted(run, row.notation),
                None,
                printed=row.perplexity,
                printed_s=row.latency_s,
            )
            for row in rows_of(run)
        ),
    )


def rows_of(run: Run) -> list[PublishedRow]:
    """The papers' own rows of the run's depth, width and prompt; those never fitted too."""
    size = (run.base.num_layers, run.base.d_model, run.seq_len)
    rows = (*published_rows(), *held_out_rows())
    return [row for row in rows if (row.num_layers, row.d_model, row.seq_len) == size and row.own_method]


def perplexity_words(point: Point) -> str:
    """The perplexity with its spread and seeds, or why there is none."""
    if point.member is not None:
        return perplexity_text(point.member)
    if point.perplexity is not None:
        return f"{point.perplexity:.2f}"
    return "not trained here" + (f"; printed {point.printed:g}" if point.printed is not None else "")


def _trained(run: Run, member: TrainedMember, number: int) -> Point:
    return Point(
        name=member.notation,
        role="baseline" if member.role == "baseline" else "front" if number else "dominated",
        number=number,
        architecture=run.priced_form(member.most_expensive),
        perplexity=member.perplexity,
        member=member,
    )


def _nearest(behind: Sequence[TrainedMember]) -> list[TrainedMember]:
    """The first of them by Pareto rank, best first; in order of proposal where that is equal."""
    names, points = [member.candidate_id for member in behind], [member.point for member in behind]
    rank = dict(zip(names, ranks(points), strict=True))
    return sorted(behind, key=lambda member: rank[member.candidate_id])[:MOST_DOMINATED]


def _accounted(run: Run, notation: str) -> Architecture:
    architecture = parse(notation, run.base).architecture
    return deployed(architecture) if run.config.accounting == "deployed" else architecture
