"""Least seconds of an engine run under conditions of its link, once everything is set up."""

from collections.abc import Sequence

from costmodel.engine.job import Job
from costmodel.engine.links import UNHINDERED, Condition, Link
from costmodel.engine.shaped_link import shaped
from costmodel.engine.spu import EngineError, Pass, passes
from costmodel.errors import UserError
from costmodel.protocols.cheetah_preprocessing import BATCH_MESSAGES

REPEATS = 2
WARM_UPS = 2  # what is made once, and batches that the first pass nearly used up


def least_passes(job: Job, link: Link, conditions: Sequence[Condition], *, repeats: int = REPEATS) -> tuple[Pass, ...]:
    """For each condition the fastest of so many passes, since whatever else the machine does only adds to them.

    Passes that made a batch of oblivious transfers ahead, which shows in their messages, are left out; triples for
    small products, which cheetah makes in small batches, are not.

    Raises UserError for fewer repeats than one, a condition that the link does not have, or an engine that is not
    installed; EngineError if the engine fails, or all passes under a condition made transfers ahead.
    """
    if repeats < 1:
        raise UserError(f"`repeats` must be at least 1, but got {repeats}.")
    done, _ = passes(job, link, [*[UNHINDERED] * WARM_UPS, *list(conditions) * repeats])
    rest = done[WARM_UPS:]
    most = min(map(_messages, rest)) + BATCH_MESSAGES - 1
    return tuple(
        _least(condition, [each for each in rest[index :: len(conditions)] if _messages(each) <= most])
        for index, condition in enumerate(conditions)
    )


def measure_on_link(
    job: Job,
    *,
    bandwidth_bits_per_s: float | None,
    delay_s: float = 0.0,
    repeats: int = REPEATS,
) -> Pass:
    """Seconds of a pass, and of every op in it, on a link of a bandwidth (None: no limit) and a one-way delay.

    Raises UserError, with the reason, where no such link can be made; else as `least_passes`.
    """
    condition = Condition(bandwidth_bits_per_s=bandwidth_bits_per_s, delay_s=delay_s)
    return least_passes(job, shaped, [condition], repeats=repeats)[0]


def _messages(done: Pass) -> int:
    return sum(cost.messages for cost in done.by_op)


def _least(condition: Condition, found: Sequence[Pass]) -> Pass:
    if not found:
        raise EngineError(f"every pass under {condition} made oblivious transfers ahead; use more repeats.")
    return min(found, key=lambda done: done.seconds)
