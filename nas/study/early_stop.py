"""Whether a trial is stopped at a rung: a function of earlier results alone."""

from collections.abc import Iterable

from nas.results.pareto import dominates
from nas.study.finalists import Result


def dominated_at_rung(rung: int, latency_s: float, val_loss: float, rivals: Iterable[Result]) -> bool:
    """Whether an earlier trial was at least as cheap and as good at this rung, and better in one of the two.

    Only then is a trial stopped early, so the cheap end of the front survives whatever its loss.
    """
    point = (latency_s, val_loss)
    return any(
        dominates((rival.latency_s, rival.rung_losses[rung]), point)
        for rival in rivals
        if rung < len(rival.rung_losses)
    )
