"""Runs a plan of series under the engine, reports progress and saves every timing at once."""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from rich.progress import Progress, TimeElapsedColumn

from costmodel.calibration.microbenchmark import Series, Timing, measure, save, saved
from costmodel.config.console import Console
from costmodel.config.units import format_seconds
from costmodel.engine.assignment import CRYPTEN
from costmodel.engine.installed import INSTALL, check_installed
from costmodel.errors import StoppedError, UserError
from costmodel.estimate import ENGINE
from costmodel.protocols.primitives import EngineSetting


def check_engine(protocol: str) -> None:
    """Check that the engine is installed and has the version of the formulas; a UserError is raised if not."""
    check_installed(protocol)
    if protocol != CRYPTEN and (engine := f"SecretFlow-SPU {version('spu')}") != ENGINE:
        raise UserError(f"the engine must be {ENGINE}, which the formulas are of, but is {engine}; run: {INSTALL}")


def timings_file(output: Path, protocol: str, setting: EngineSetting, num_pass: int = 1) -> Path:
    """Return the file of the timings so far, beside the testbed to be written, for pass `num_pass` (from 1)."""
    threads = "" if setting.threads == 1 else f".{setting.threads}-threads"
    later = "" if num_pass == 1 else f".pass-{num_pass}"
    return output.with_suffix(f".{protocol}{threads}{later}.timings.jsonl")


def timed_run(
    plan: Sequence[Series],
    protocol: str,
    setting: EngineSetting,
    path: Path,
    expected_s: Callable[[Series], float] = lambda series: 1.0,
) -> list[Timing]:
    """Return the timing of every series; those in the file at `path` are not measured again.

    `expected_s` estimates a series in any unit, from which the time left is reported on stderr. A StoppedError that
    says how to resume is raised if the engine fails.
    """
    known, timings = saved(path), list[Timing]()
    console, total = Console(stderr=True, highlight=False, soft_wrap=True), len(plan)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(protocol, total=sum(map(expected_s, plan)), visible=console.is_terminal)
        try:
            for series, timing in zip(plan, measure(plan, protocol, setting, known), strict=True):
                if timing not in known:
                    save(timing, path)
                timings.append(timing)
                progress.update(task, advance=expected_s(series), description=f"{protocol}: {timing.kind}")
                if not console.is_terminal:
                    left_s = progress.tasks[task].time_remaining
                    eta = "" if left_s is None else f", about {format_seconds(left_s)} left"
                    console.print(f"{protocol}: {timing.kind}, {len(timings)} of {total} series{eta}")
        except StoppedError as error:
            raise StoppedError(f"{error} Timings so far are in {path}; run the command again to go on.") from None
    return timings
