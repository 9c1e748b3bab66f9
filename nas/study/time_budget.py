"""The time budget of a search: the trainings that still fit in it are planned again before each training begins.

If the budget is too short for all trainings, there are fewer low-fidelity evaluations and final trainings. If it is
too short for a few candidates, all get fewer tokens, which `nas.study.open_trials` decides before the first training.
If no candidate can end in time, the first one is trained to its end past the budget. Only a time limit ends a run that
has trained nothing.
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

FIRST_TOLD_S = 1.0  # time after the first step until a training first reports its pace
TOLD_EVERY_S = 10.0  # time between later reports
RECENT_S = 60.0  # the pace is the average over reports of this time
LEAST_SHARE = 0.05  # share of a phase that must be done before its end is predicted
LATE_SHARE = 0.02  # share of the budget; if the first candidate is predicted to end later by more, the log says so
LEAST_SHOWN_S = 0.1  # shorter phases are not named
MARGIN = 1.1  # trainings take longer than their steps and validations: checkpoints, and the check of the folded form
ENOUGH = 6  # if at most this number of candidates would end, evaluations are given up before final trainings,
SPARE = 1.5  # unless all would fit if they took this many times as long, since the pace on a busy machine varies
VALIDATION_COST = 1 / 3  # operations of a validation token (a forward pass) as a share of those of a training token
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

    phases: seconds of each phase of the worker until the end of the trial's first step, by name. num_steps: number of
    steps after the first step or, if the trial has reported before, after its last report. seconds: their duration.
    """

    phases: Mapping[str, float]
    num_steps: int
    seconds: float


def num_equivalent_steps(scale: Scale, share: float = 1.0) -> float:
    """Return the time of a training up to a share of its tokens, validations included, in units of a step's time."""
    rungs = [rung for rung in scale.rungs if rung <= share]
    num_validated = sum(scale.validation_tokens if rung == 1 else scale.rung_validation_tokens for rung in rungs)
    return share * scale.num_steps + VALIDATION_COST * num_validated / (scale.batch * scale.seq_len)


def paced(stop: Callable[[], bool], tell: Callable[[Pace], None], phases: Mapping[str, float]) -> Callable[[], bool]:
    """Return a function that a training calls after every step. It returns `stop()`, and reports the pace to `tell`.

    tell: called with the pace FIRST_TOLD_S seconds after the first step, and then every TOLD_EVERY_S seconds. phases:
    seconds of each phase before the first step, by name.
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
    """Seconds of a whole final training, of a low-fidelity evaluation, and of the start-up that both include."""

    end_s: float
    short_s: float
    start_s: float = 0.0

    @property
    def rest_s(self) -> float:
        """Seconds of a final training that continues an evaluation, including its own start-up."""
        return self.end_s - self.short_s + self.start_s

    def of(self, training: Suggestion | Record, evaluated: Collection[int]) -> float:
        """Return the seconds of a training. evaluated: indexes of candidates with a finished evaluation.

        A candidate's final training continues its evaluation; a replicate has another seed and starts anew.
        """
        if training.is_proxy:
            return self.short_s
        return self.rest_s if training.role == "candidate" and training.index in evaluated else self.end_s


def fitting(
    left_s: float, busy_s: float, *, places: int, needs: Needs, most: Trainings, num_ended: int, num_evaluated: int
) -> Trainings:
    """Return how many of the planned trainings fit in the `left_s` seconds that are left.

    The planned ratio of evaluations to final trainings does not change, unless at most ENOUGH candidates would end:
    then there are only as many evaluations as would fit if everything took SPARE times as long.

    busy_s: sum of the seconds that trainings in progress or already proposed still take. places: trainings at a time.
        most: planned trainings that were not proposed yet. num_ended: candidates whose final training was already
        proposed. num_evaluated: candidates that can be promoted without another evaluation.
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
    """The time budget and limit of a run, counted from the start of the command, and the time that was used.

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
        """Seconds until budget or limit, whichever is earlier; negative after it, infinite if there is neither."""
        return self._seconds - self.used_s

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step, over the last minute of reports; None before any pace was measured or reported."""
        num_steps = sum(pace.num_steps for _, pace in self._recent)
        return sum(pace.seconds for _, pace in self._recent) / num_steps if num_steps else None

    def spent(self) -> str:
        """Return the names and durations of the phases so far, as text; very short phases are left out."""
        return ", ".join(f"{phase} {format_seconds(s)}" for phase, s in self._phases.items() if s >= LEAST_SHOWN_S)

    def mark(self, phase: str) -> None:
        """Record that a phase ends now, which began at the last mark; do nothing if it was recorded before."""
        if phase not in self._phases:
            now_s = time.monotonic()
            self._phases[phase], self._marked_s = now_s - self._marked_s, now_s

    def prepare(self, share: float = 1.0) -> None:
        """Predict when the present phase, before any training, ends. share: how much of it is done, from 0 to 1.

        Logs once if the predicted end is after the time budget. Raises StoppedError if it is after the limit.
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
        """Enter measured seconds of a step into `step_s`; a report that comes RECENT_S later drops them."""
        self._recent.append((time.monotonic(), Pace(phases={}, num_steps=1, seconds=step_s)))

    def told(self, key: TrialKey, pace: Pace) -> None:
        """Enter the pace that a trial reports into `step_s`, and its steps and phases into the plan."""
        now_s = time.monotonic()
        self._recent.append((now_s, pace))
        while self._recent[0][0] < now_s - RECENT_S:
            self._recent.popleft()
        self._taken[key] += pace.num_steps
        self._start_s = sum(pace.phases.values())
        for phase, phase_s in pace.phases.items():
            self._phases.setdefault(phase, phase_s)

    def plan(self, trials: Trials, places: int) -> None:
        """Set how many trainings the schedule may still propose, and log the predicted number if it has changed.

        Does nothing before a pace is known, or without budget and limit. places: trainings at a time. Halts the run if
        no candidate would end by the time limit and no shorter budget is set.
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
        """Whether a training may begin: it must be predicted to end in time, an evaluation with its final training.

        Candidates may begin in any case until one has begun its final training. A baseline may begin only if all
        candidates fit in time too.
        """
        schedule, most = trials.schedule, trials.schedule.most.ends
        if suggestion.role == "candidate" and not any(_finals(trials)):
            return True
        if suggestion.role == "baseline" and schedule.asked.ends + schedule.remaining.final_trainings < most:
            return False
        return self._needs.of(replace(suggestion, is_proxy=False), schedule.proxy_evals) <= self.left_s

    def is_over(self, trials: Trials) -> bool:
        """Whether the run must stop now: after the limit, or after the budget if a candidate has completed.

        A candidate that diverged or failed counts as completed if no other candidate is in its final training.
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
