"""The time budget of a search: which trainings still fit in it, planned again before each one begins.

A budget that is too short for all trainings is met by doing less: fewer low-fidelity evaluations and final trainings
here, and fewer tokens for all of them before the first one (`nas.study.open_trials`). If no candidate can end in time,
the first one is trained to its end past the budget. Only a time limit ends a run that has trained nothing.
"""

import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from costmodel.config.units import format_seconds
from costmodel.errors import StoppedError
from nas.recipe.recipe import Scale
from nas.run.ledger import Record, TrialKey
from nas.searchers.strategy import Suggestion
from nas.study.schedule import Trainings
from nas.study.trials import Trials

_log = logging.getLogger(__name__)

FIRST_TOLD_S = 1.0  # of steps after the first one, until the pace of a training is told,
TOLD_EVERY_S = 10.0  # and then again
RECENT_S = 60.0  # the pace is that of the last minute
LEAST_SHARE = 0.05  # of a phase, from which its end is foreseen
LATE_SHARE = 0.02  # of the budget; if the first candidate will end later than by this share, a line says so
LEAST_SHOWN_S = 0.1  # shorter phases are not named
MARGIN = 1.1  # trainings take longer than their steps and validations: checkpoints, and the check of the folded form
ENOUGH = 6  # with at most so many final trainings, low-fidelity evaluations are given up first,
SPARE = 1.5  # unless all fit in time with this factor, as the pace of a busy machine is hardly known
VALIDATION_COST = 1 / 3  # of a token, as a share of a training token's: its forward pass, by count of operations
STAT = Path("/proc/self/stat")


def process_start_s() -> float:
    """Return when this process was started, on the clock of `time.monotonic`; now if the system does not say."""
    now_s = time.monotonic()
    try:
        ticks = int(STAT.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return now_s
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")  # proc(5), field 22
    return now_s - max(0.0, age_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How fast a trial trains.

    phases: seconds of each phase of its worker until its first step ended, by name. num_steps: steps since then, or
    since the last pace. seconds: duration of these steps.
    """

    phases: Mapping[str, float]
    num_steps: int
    seconds: float


def num_equivalent_steps(scale: Scale, share: float = 1.0) -> float:
    """Return the steps of a training up to a share of its tokens, its validations counted as steps of equal time."""
    rungs = [rung for rung in scale.rungs if rung <= share]
    num_validated = sum(scale.validation_tokens if rung == 1 else scale.rung_validation_tokens for rung in rungs)
    return share * scale.num_steps + VALIDATION_COST * num_validated / (scale.batch * scale.seq_len)


def paced(stop: Callable[[], bool], tell: Callable[[Pace], None], phases: Mapping[str, float]) -> Callable[[], bool]:
    """Return a function to call after every step, which returns `stop()`, and every TOLD_EVERY_S tells the pace.

    phases: seconds of each phase before the first step, by name. tell: called with the pace, first after FIRST_TOLD_S.
    """
    began_s, since_s, num_steps, wait_s = time.monotonic(), 0.0, -1, FIRST_TOLD_S

    def after_step() -> bool:
        nonlocal since_s, num_steps, wait_s, phases
        now_s, num_steps = time.monotonic(), num_steps + 1
        if num_steps == 0:
            since_s, phases = now_s, {**phases, "compiler and first step": now_s - began_s}
        elif now_s - since_s >= wait_s:
            tell(Pace(phases=phases, num_steps=num_steps, seconds=now_s - since_s))
            since_s, num_steps, wait_s = now_s, 0, TOLD_EVERY_S
        return stop()

    return after_step


class Needs(NamedTuple):
    """Seconds of a training to the end, of a low-fidelity evaluation, and of the start that is part of each."""

    end_s: float
    short_s: float
    start_s: float = 0.0

    @property
    def rest_s(self) -> float:
        """Seconds of a final training that continues an evaluation, including a start of its own."""
        return self.end_s - self.short_s + self.start_s

    def of(self, training: Suggestion | Record, evaluated: Collection[int]) -> float:
        """Seconds of a training. evaluated: indexes of candidates whose final training continues their evaluation."""
        if training.is_proxy:
            return self.short_s
        return self.rest_s if training.index in evaluated else self.end_s


def fitting(
    left_s: float, busy_s: float, *, places: int, needs: Needs, most: Trainings, num_ended: int, num_evaluated: int
) -> Trainings:
    """Return how many of the planned trainings fit in the seconds that are left.

    The planned ratio of evaluations to final trainings is kept, unless at most ENOUGH candidates would end: then there
    are only as many evaluations as would fit if everything took SPARE times as long.

    busy_s: seconds that trainings in progress or already proposed still take, added up. places: trainings at a time.
        most: planned trainings that were not asked for yet. num_ended: candidates whose final training was already
        asked for. num_evaluated: candidates that could be promoted at once.
    """
    rest_s, room_s = needs.rest_s, places * left_s - busy_s
    for ends in range(most.ends, 0, -1):
        wanted, are_few = math.ceil(most.shorts * ends / most.ends), num_ended + ends <= ENOUGH
        for shorts in range(wanted, -1, -1) if are_few else (wanted,):
            promoted = min(ends, shorts + num_evaluated)
            used_s = shorts * needs.short_s + promoted * rest_s + (ends - promoted) * needs.end_s
            first_s = rest_s if num_evaluated else needs.end_s  # evaluated or not, since an evaluation is a part of it
            spare = SPARE if shorts and are_few else 1.0
            if spare * used_s <= room_s and max(first_s, math.ceil(ends / places) * rest_s) <= left_s:
                return Trainings(ends, shorts)
    return Trainings(0, 0)


class TimeBudget:
    """The seconds of a run, counted from the start of the command, and what took them.

    seconds: planned time of the run; None without a budget. began_s: start of the command, on the clock of
    `time.monotonic`. limit_s: seconds after which the run ends in any case; None without a limit.
    """

    def __init__(self, seconds: float | None, began_s: float, limit_s: float | None = None) -> None:
        self._limit_s = math.inf if limit_s is None else limit_s
        self._seconds, self._began_s = min(math.inf if seconds is None else seconds, self._limit_s), began_s
        self._phases: dict[str, float] = {}
        self._marked_s, self._is_late = began_s, False
        self._start_s, self._recent = 0.0, deque[tuple[float, Pace]]()
        self._taken: Counter[TrialKey] = Counter()  # steps of each training in this process
        self._needs = Needs(0.0, 0.0)
        self._logged_s, self._logged = -math.inf, -1  # when, and how many candidates

    @property
    def used_s(self) -> float:
        """Seconds since the command started."""
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left; negative beyond it."""
        return self._seconds - self.used_s

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step, over the last minute of reports; None before any pace was reported."""
        num_steps = sum(pace.num_steps for _, pace in self._recent)
        return sum(pace.seconds for _, pace in self._recent) / num_steps if num_steps else None

    def spent(self) -> str:
        """Name the phases so far, with their seconds."""
        return ", ".join(f"{phase} {format_seconds(s)}" for phase, s in self._phases.items() if s >= LEAST_SHOWN_S)

    def mark(self, phase: str) -> None:
        """Count the time since the last mark for a phase that ends now; does nothing if the phase ended before."""
        if phase not in self._phases:
            now_s = time.monotonic()
            self._phases[phase], self._marked_s = now_s - self._marked_s, now_s

    def prepare(self, share: float = 1.0) -> None:
        """Predict when a phase before any training ends. share: how much of the phase is done, from 0 to 1.

        Logs once if that exceeds the time budget. Raises StoppedError if it exceeds the limit.
        """
        rest_s = (time.monotonic() - self._marked_s) * (1 / share - 1) if share >= LEAST_SHARE else 0.0
        needed_s = self.used_s + rest_s
        if needed_s >= self._limit_s:
            raise StoppedError(
                f"--time-limit {format_seconds(self._limit_s)} must be more than the {format_seconds(needed_s)} that "
                f"pass before any training ({self.spent()}, and what follows); give at least twice as much as that."
            )
        if needed_s >= self._seconds and not self._is_late:
            self._is_late = True
            _log.info(
                f"note: {format_seconds(needed_s)} pass before any training, more than --time-budget "
                f"{format_seconds(self._seconds)}; the first candidate is trained to its end past it"
            )

    def expect(self, step_s: float) -> None:
        """Use a pace that was measured before the first trial, until trials report their own."""
        self._recent.append((time.monotonic(), Pace(phases={}, num_steps=1, seconds=step_s)))

    def told(self, key: TrialKey, pace: Pace) -> None:
        """Use the pace that a trial reports."""
        now_s = time.monotonic()
        self._recent.append((now_s, pace))
        while self._recent[0][0] < now_s - RECENT_S:
            self._recent.popleft()
        self._taken[key] += pace.num_steps
        self._start_s = sum(pace.phases.values())
        for phase, phase_s in pace.phases.items():
            self._phases.setdefault(phase, phase_s)

    def plan(self, trials: Trials, places: int) -> None:
        """Plan which trainings the schedule asks for, and log how many candidates will end if that has changed.

        places: trainings at a time. Halts the run if no candidate would end by the time limit and no shorter
        budget is set.
        """
        step_s, schedule, scale = self.step_s, trials.schedule, trials.setting.recipe.scale
        if math.isinf(self._seconds) or step_s is None:
            return
        shares = 1.0, scale.rungs[0]
        end_s, short_s = (self._start_s + step_s * num_equivalent_steps(scale, share) for share in shares)
        needs = Needs(*(MARGIN * seconds for seconds in (end_s, short_s, self._start_s)))
        asked, evaluated = schedule.asked, schedule.proxy_evals
        for key in self._taken.keys() - trials.running.keys():
            del self._taken[key]
        rests_s = {
            key: max(0.0, needs.of(trial.record, evaluated) - MARGIN * step_s * self._taken[key])
            for key, trial in trials.running.items()
        }
        fits = fitting(
            self.left_s,
            sum(rests_s.values()) + sum(needs.of(proposal, evaluated) for proposal in schedule.waiting),
            places=places,
            needs=needs,
            most=Trainings(*(most - num for most, num in zip(schedule.most, asked, strict=True))),
            num_ended=asked.ends,
            num_evaluated=schedule.num_evaluated,
        )
        self._needs = needs
        if not asked.ends:
            fits = Trainings(max(1, fits.ends), fits.shorts)
        schedule.plan(fits)
        running, ended = _finals(trials)
        first_s = min((rests_s[record.index, record.seed] for record in running), default=needs.end_s)
        late_s = 0.0 if _any_completed(ended) else first_s - self.left_s
        if self._seconds == self._limit_s and late_s > (MARGIN - 1) * self._limit_s:
            needed_s = self._limit_s + late_s
            trials.halt(
                f"no candidate would be trained to the end within --time-limit {format_seconds(self._limit_s)}, since "
                f"the first one takes until about {format_seconds(needed_s)}; give at least "
                f"{math.ceil(1.2 * needed_s / 60)}min, or fewer --tokens"
            )
        elif self._start_s:  # a trial has told its pace
            self._log(asked.ends + fits.ends, schedule.most.ends, step_s, late_s)

    def _log(self, count: int, num_trials: int, step_s: float, late_s: float) -> None:
        """Log the plan: how many candidates end, or how late the first one does."""
        now_s, count = time.monotonic(), 0 if late_s > LATE_SHARE * self._seconds else count
        changed = abs(count - self._logged) >= max(2, self._logged / 5) or (count == 0) != (self._logged == 0)
        if not changed or now_s - self._logged_s < RECENT_S:
            return
        outcome = f"about {count} of {num_trials} candidates will be trained to the end in it"
        if not count:
            outcome = f"no candidate ends in it; the first one does about {format_seconds(late_s)} later"
        spent = f" ({self.spent()})" if self._logged_s == -math.inf else ""
        _log.info(
            f"time budget {format_seconds(self._seconds)}: {format_seconds(self.used_s)} used so far{spent}; at "
            f"{format_seconds(step_s)} a step, {outcome}"
        )
        self._logged_s, self._logged = now_s, count

    def has_time_for(self, trials: Trials, suggestion: Suggestion) -> bool:
        """Whether a training may begin: it ends in time, or no final training of a candidate has begun yet.

        An evaluation must leave time for its final training. A baseline may begin only if all candidates fit in time.
        """
        schedule, most = trials.schedule, trials.schedule.most.ends
        if suggestion.role == "candidate" and not any(_finals(trials)):
            return True
        if suggestion.role == "baseline" and schedule.asked.ends + schedule.remaining.final_trainings < most:
            return False
        return self._needs.of(replace(suggestion, is_proxy=False), schedule.proxy_evals) <= self.left_s

    def is_over(self, trials: Trials) -> bool:
        """Whether the run must stop now: after the limit, or after the budget if a candidate has completed.

        After the budget, candidates that diverged or failed count once no other is in its final training.
        """
        if self.used_s >= self._limit_s:
            return True
        running, ended = _finals(trials)
        return self.left_s <= 0 and (_any_completed(ended) or bool(ended and not running))


def _finals(trials: Trials) -> tuple[list[Record], list[Record]]:
    """Return the final trainings of candidates at the seed of the run: those in progress, and those that ended."""
    running = [trial.record for trial in trials.running.values()]
    ended = [record for record in trials.records if record.event == "finished"]
    running, ended = (
        [record for record in records if record.role == "candidate" and not record.is_proxy]
        for records in (running, ended)
    )
    return running, ended


def _any_completed(records: Iterable[Record]) -> bool:
    return any(record.status == "completed" for record in records)
