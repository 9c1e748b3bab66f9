"""The time budget of a search: what it is spent on, and how many candidates will be trained to the end within it."""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from costmodel.config.units import format_seconds
from costmodel.errors import StoppedError
from nas.recipe.recipe import Scale
from nas.run.ledger import TrialKey
from nas.study.trials import Trials

_log = logging.getLogger(__name__)

LEAST_S = 1.0  # of steps after the first one, from which the pace of a training is told
LEAST_SHARE = 0.05  # of a phase, from which its end is foreseen
MARGIN = 1.25  # a run is halted if its first candidate needs this many times the time that is left
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
    """How fast a trial begins. phases: seconds of its worker until its first step ended. step_s: of a later step."""

    phases: Mapping[str, float]
    step_s: float

    def training_s(self, scale: Scale, share: float = 1.0) -> float:
        """Seconds of a training up to a share of its tokens, with its start and validations."""
        rungs = [rung for rung in scale.rungs if rung <= share]
        num_validated = sum(scale.validation_tokens if rung == 1 else scale.rung_validation_tokens for rung in rungs)
        steps = share * scale.num_steps + VALIDATION_COST * num_validated / (scale.batch * scale.seq_len)
        return sum(self.phases.values()) + self.step_s * steps


def paced(stop: Callable[[], bool], tell: Callable[[Pace], None], phases: Mapping[str, float]) -> Callable[[], bool]:
    """Return `stop`, to be called after every step, that tells the pace of a training once. phases: before it."""
    began_s, first_s, num_steps, is_told = time.monotonic(), 0.0, 0, False

    def after_step() -> bool:
        nonlocal first_s, num_steps, is_told
        now_s, num_steps = time.monotonic(), num_steps + 1
        if num_steps == 1:
            first_s = now_s
        elif not is_told and now_s - first_s >= LEAST_S:
            is_told = True
            first = {"compiler and first step": first_s - began_s}
            tell(Pace(phases={**phases, **first}, step_s=(now_s - first_s) / (num_steps - 1)))
        return stop()

    return after_step


def num_within(
    left_s: float, *, first_s: float, end_s: float, short_s: float, places: int, num_trials: int, num_short: int
) -> int:
    """Return about how many candidates will be trained to the end in the seconds that are left.

    first_s: until the first one will. end_s, short_s: of a training to the end, and of a low-fidelity evaluation.
    places: trainings at a time. num_trials, num_short: trainings of either kind that are planned.
    """
    if first_s > left_s:
        return 0
    each_s = (end_s + short_s * num_short / num_trials) / places
    return min(num_trials, 1 + int((left_s - first_s) / each_s))


class TimeBudget:
    """The seconds of a run, from the start of the command, and what they went to. seconds: None without limit."""

    def __init__(self, seconds: float | None, began_s: float) -> None:
        self._seconds, self._began_s = math.inf if seconds is None else seconds, began_s
        self._phases: dict[str, float] = {}
        self._marked_s, self._is_told = began_s, False

    @property
    def left_s(self) -> float:
        return self._seconds - (time.monotonic() - self._began_s)

    def spent(self, pace: Pace | None = None) -> str:
        """Name the phases so far with their seconds. pace: of the first trial, if it is known."""
        phases = {**self._phases, **(pace.phases if pace else {})}
        return ", ".join(f"{phase} {format_seconds(phase_s)}" for phase, phase_s in phases.items() if phase_s)

    def mark(self, phase: str) -> None:
        """Count the time since the last mark as that of a phase, the first time it ends."""
        if phase not in self._phases:
            now_s = time.monotonic()
            self._phases[phase], self._marked_s = now_s - self._marked_s, now_s

    def require_left(self, share: float = 1.0) -> None:
        """Raise StoppedError if the time will be used up before the end of a phase, of which a share is done."""
        phase_s = time.monotonic() - self._marked_s
        rest_s = phase_s * (1 / share - 1) if share >= LEAST_SHARE else 0.0
        if rest_s >= self.left_s:
            needed_s = self._seconds - self.left_s + rest_s
            raise StoppedError(
                f"--time-budget {format_seconds(self._seconds)} must be more than the {format_seconds(needed_s)} that "
                f"pass before any training ({self.spent()}, and what follows); give at least twice as much as that."
            )

    def foresee(self, trials: Trials, pace: Pace, places: int, elapsed_s: Callable[[TrialKey], float]) -> None:
        """Log how many candidates will end in the time, once; halt the run as soon as it is clear that none will.

        pace: of a trial that has just begun. elapsed_s: seconds that a running trial has taken.
        """
        config, scale, left_s = trials.setting.config, trials.setting.recipe.scale, self.left_s
        ended = (record.status == "completed" and record.role == "candidate" for record in trials.records)
        if math.isinf(left_s) or any(ended):
            return
        end_s, short_s = pace.training_s(scale), pace.training_s(scale, scale.rungs[0])
        running = [
            elapsed_s(key)
            for key, trial in trials.running.items()
            if trial.record.role == "candidate" and not trial.record.is_proxy
        ]
        num_short = config.most_proxy_evals if any(trial.record.is_proxy for trial in trials.running.values()) else 0
        rounds = 0 if running else math.ceil(num_short / config.num_trials / places)
        first_s = end_s - max((0.0, *running)) + rounds * short_s
        seconds = {"first_s": first_s, "end_s": end_s, "short_s": short_s}
        count = num_within(left_s, **seconds, places=places, num_trials=config.num_trials, num_short=num_short)
        needed_s = self._seconds - left_s + first_s
        remedy = f"give at least {math.ceil(1.2 * needed_s / 60)}min, or fewer --tokens"
        remedy += " or --num-proxy-evals 0" if num_short else ""
        if not self._is_told:
            self._is_told = True
            _log.info(
                f"time budget {config.time_budget}: {format_seconds(self._seconds - left_s)} used so far "
                f"({self.spent(pace)}); "
                f"at {format_seconds(pace.step_s)} a step, about {count} of {config.num_trials} candidates will be "
                f"trained to the end in it" + ("" if count else f"; {remedy}")
            )
        if first_s > MARGIN * left_s:
            trials.halt(
                f"no candidate would be trained to the end within --time-budget {config.time_budget}, since the first "
                f"one takes until about {format_seconds(needed_s)}; {remedy}"
            )
