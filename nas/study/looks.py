"""What a look says of the end: the log-perplexity expected of a training that stands at a rung.

The prior is of 150 placements from the builtin parent (`experiments/data/table-12.csv`), of which a line of slope 0.74
leaves 0.044 nats after a quarter of the tokens and 0.018 where losses are within 0.7 nats of the parent's. Over parents
of widths 48, 96 and 192 (`across-widths.csv`) slopes are 0.85, 0.81 and 0.78, and 0.02 to 0.03 nats are left.

Source: Swersky, Snoek and Adams 2014, arXiv 1406.3896, for going on with what was paused by what its curve promises.
"""

from collections.abc import Sequence

from nas.searchers.early import End, Line, after_looks
from nas.study.finalists import Result

FROM_PARENT = Line((-0.1, 0.74), (0.2, 0.15), around=0.025)
FROM_SCRATCH = Line((-0.1, 0.74), (0.4, 0.3), around=0.025)  # where nothing is known of what candidates can reach


def ends_after_looks(results: Sequence[Result], parent_loss: float | None) -> list[End | None]:
    """The ends that are expected of the results that are looks; None for the others.

    parent_loss: nats, of what they start from; None from scratch, where the least loss at a rung takes its place.
    """
    looks = [result.rung_losses[0] for result in results if result.status == "paused"]
    if not looks:
        return [None] * len(results)
    base = min(looks) if parent_loss is None else parent_loss
    ended = [
        (result.rung_losses[0], result.log_perplexity)
        for result in results
        if result.log_perplexity is not None and result.rung_losses
    ]
    line = FROM_SCRATCH if parent_loss is None else FROM_PARENT
    expected = iter(after_looks(looks, ended, line, base))
    return [next(expected) if result.status == "paused" else None for result in results]
