"""Rounds of a run under the engine, measured: how much longer it takes for each second that a message is under way.

The engine counts messages, and most of them wait for none. So the same parties run the same ops several times through
a relay that holds every message for a delay, and the slope of wall time against that one-way delay is the number of
delays that follow one another: rounds, as `costmodel.cost` defines them. Ops are run one after the other without any
barrier, as in earnest, so that a party that waits for nothing in one op is ahead in the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.engine import Pass
from costmodel.job import Job
from costmodel.links import Condition, delayed
from costmodel.repeated import REPEATS, least_passes

LEAST_DELAYS = 3  # any two times lie on a line


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRounds:
    """rounds: the slope of `seconds` against the one-way delay; by_op: likewise of each op, in order.

    residual_s: the greatest distance of a time from the fitted line. seconds: a pass takes, by delay.
    """

    rounds: float
    by_op: tuple[float, ...]
    residual_s: float
    seconds: tuple[tuple[float, float], ...]


def check_delays(delays_s: Sequence[float]) -> None:
    """Raises ValueError for fewer than three different delays, or a negative one."""
    if len(set(delays_s)) < LEAST_DELAYS or min(delays_s) < 0:
        raise ValueError(
            f"rounds are a slope over at least {LEAST_DELAYS} different one-way delays, but got {list(delays_s)} s; "
            "10ms, 20ms and 40ms will do."
        )


def measured_rounds(
    job: Job, *, delays_s: Sequence[float], repeats: int = REPEATS, timeout_s: float | None = None
) -> MeasuredRounds:
    """Rounds of one pass, without what the engine sets up once or makes in batches of oblivious transfers.

    What cheetah waits for while it makes triples for small products is in them, where a pass makes some.

    Raises ValueError for fewer than three different delays, or an engine that is not installed; EngineError.
    """
    check_delays(delays_s)
    delays = sorted(set(delays_s))
    conditions = [Condition(delay_s=delay_s) for delay_s in delays]
    return _fitted(delays, least_passes(job, delayed, conditions, repeats=repeats, timeout_s=timeout_s))


def _fitted(delays: Sequence[float], done: Sequence[Pass]) -> MeasuredRounds:
    seconds = [each.seconds for each in done]
    slope, intercept = np.polyfit(delays, seconds, 1)
    by_op = np.polyfit(delays, [[cost.seconds for cost in each.by_op] for each in done], 1)[0]
    return MeasuredRounds(
        rounds=float(slope),
        by_op=tuple(map(float, by_op)),
        residual_s=float(np.abs(slope * np.array(delays) + intercept - seconds).max()),
        seconds=tuple(zip(delays, seconds, strict=True)),
    )
