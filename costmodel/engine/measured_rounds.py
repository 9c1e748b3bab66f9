"""Measures the rounds of a run under the engine: the extra seconds for each second of delay between the parties.

The engine counts messages, but does not wait for most of them. Therefore the same parties run the same ops several
times through a relay that delays every message. The slope of wall time over the one-way delay is the number of delays
that follow one another: rounds, as `costmodel.cost` defines them. As in a normal run, there is no barrier between ops,
so a party that does not wait in one op is ahead in the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.config.units import parse_seconds
from costmodel.engine.links import UNHINDERED, delayed
from costmodel.engine.spu import Job, Pass, passes
from costmodel.errors import StoppedError, UserError
from costmodel.protocols.cheetah_preprocessing import BATCH_MESSAGES

LEAST_DELAYS = 3  # any two times lie on a line
REPEATS = 2
WARM_UPS = 2  # for one-time set-up, and for batches that the first pass almost used up


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRounds:
    """Rounds of every op, in order: the slope of its seconds over the one-way delay.

    `seconds` are the seconds of all ops, by delay. `residual_s` is their largest distance from the fitted line.
    """

    by_op: tuple[float, ...]
    seconds: tuple[tuple[float, float], ...]
    residual_s: float

    @property
    def rounds(self) -> float:
        """Rounds of all ops together."""
        return sum(self.by_op)


def check_delays(delays_s: Sequence[float]) -> None:
    """Raise UserError unless there are at least three different delays, none of them negative."""
    if len(set(delays_s)) < LEAST_DELAYS or min(delays_s) < 0:
        raise UserError(
            f"rounds are a slope over at least {LEAST_DELAYS} different one-way delays, but got {list(delays_s)} s; "
            "10ms, 20ms and 40ms will do."
        )


def parse_delays(text: str) -> tuple[float, ...]:
    """Return delays such as `10ms,20ms,40ms` in seconds. Raise UserError as `check_delays`, or for other text."""
    delays_s = tuple(parse_seconds(part, "--delays") for part in text.split(","))
    check_delays(delays_s)
    return delays_s


def measured_rounds(job: Job, *, delays_s: Sequence[float]) -> MeasuredRounds:
    """Return the rounds of one pass, without one-time set-up and without batches of oblivious transfers.

    Under cheetah, the rounds of making triples for small products are included, if a pass makes some.

    Raise UserError for fewer than three different delays, or an engine that is not installed; StoppedError if the
    engine fails, or all passes under a delay made transfers ahead.
    """
    check_delays(delays_s)
    delays = sorted(set(delays_s))
    done, _ = passes(job, delayed, [*[UNHINDERED] * WARM_UPS, *delays * REPEATS])
    rest, fastest = done[WARM_UPS:], []
    most = min(map(_messages, rest)) + BATCH_MESSAGES - 1  # cheetah makes triples in smaller batches, which stay
    for index, delay_s in enumerate(delays):
        without_batch = [run for run in rest[index :: len(delays)] if _messages(run) <= most]
        if not without_batch:
            raise StoppedError(f"every pass with {delay_s} s made oblivious transfers ahead; use more repeats.")
        # the fastest, since whatever else the machine does only adds to a pass
        fastest.append(min(without_batch, key=lambda run: run.seconds))
    return _fitted(delays, fastest)


def _messages(run: Pass) -> int:
    return sum(cost.messages for cost in run.by_op)


def _fitted(delays: Sequence[float], done: Sequence[Pass]) -> MeasuredRounds:
    by_op = np.array([[cost.seconds for cost in run.by_op] for run in done])  # delays x ops
    (slopes, intercepts), seconds = np.polyfit(delays, by_op, 1), by_op.sum(axis=1)
    residuals = np.outer(delays, slopes).sum(axis=1) + intercepts.sum() - seconds
    return MeasuredRounds(
        by_op=tuple(slopes.tolist()),
        seconds=tuple(zip(delays, seconds.tolist(), strict=True)),
        residual_s=float(np.abs(residuals).max()),
    )
