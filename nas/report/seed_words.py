"""Words for what several seeds say: perplexity with its spread, neighbours on a front, members that did not hold."""

from collections.abc import Sequence

from nas.results.front import unstable
from nas.results.ledger import Record
from nas.results.members import TrainedMember, in_noise

SPREAD = "± two standard errors of the mean over seeds"
IN_NOISE = "within noise of its cheaper neighbour"


def perplexity_text(member: TrainedMember) -> str:
    """`33.10 ± 0.42 (3 seeds)`, or `33.10 (1 seed)`: the exponential of the mean loss, half the width of its bounds."""
    bounds = member.perplexity_bounds
    spread = "" if bounds is None else f" ± {(bounds[1] - bounds[0]) / 2:.2f}"
    return f"{member.perplexity:.2f}{spread} ({seeds_text(member)})"


def seeds_text(member: TrainedMember) -> str:
    """`3 seeds`, or `1 of 3 seeds diverged`."""
    whole = member.num_seeds + member.num_diverged
    if member.num_diverged:
        return f"{member.num_diverged} of {whole} seeds diverged"
    return f"{whole} seed{'s' if whole > 1 else ''}"


def noise_marks(front: Sequence[TrainedMember]) -> list[str]:
    """For each member of a front, cheapest first, IN_NOISE or nothing."""
    return [IN_NOISE if inside else "" for inside in in_noise(front)]


def unstable_lines(records: Sequence[Record]) -> list[str]:
    """Candidates that one seed trained and another did not."""
    return [
        f"not on the front: {member.arch_id} {member.notation}: {seeds_text(member)}; perplexity of the "
        f"{'others' if member.num_seeds > 1 else 'other'} {member.perplexity:.2f}"
        for member in unstable(records)
    ]
