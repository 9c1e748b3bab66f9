"""The progress of a run on a terminal: one live table, or plain lines if the output is not a terminal."""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from costmodel.config.units import format_seconds
from nas.corpus.ngrams import TRIGRAM
from nas.run.run import Run, Summary

REFRESH_S = 1.0
LINE_EVERY_S = 30.0  # between progress lines if there is no terminal
SPEED_OVER_S = 300.0  # period over which a bar estimates the time left, since a step may take a minute


def line(run: Run, eta_s: float | None, *, live: bool = True) -> str:
    """Return the state of a run in one line. eta_s: seconds left, if known. live: whether it is being trained now."""
    summary = run.summary
    kinds = f" ({summary.completed} completed, {summary.diverged} diverged, {summary.failed} failed)"
    parts = [f"{summary.ended}/{run.num_planned} ended{kinds if summary.diverged or summary.failed else ''}"]
    if summary.evaluated:
        parts.append(f"{summary.evaluated} evaluated at low fidelity")
    if summary.replicates or summary.seeds_left:
        parts.append(f"{_more_seeds(summary)} more seeds")
    parts.append(f"{summary.running} {'running' if live else 'unfinished'}")
    if summary.front:
        parts += [f"front {len(summary.front)}", f"hypervolume {_hypervolume(summary)}"]
    parts.append(f"best perplexity in budget {_best(run)}")
    if eta_s is not None:
        parts.append(f"ETA {format_seconds(eta_s)}")
    return ", ".join(parts)


def table(run: Run, eta_s: float | None) -> Table:
    """Return the state of a run as a table of one row. eta_s: as in `line`."""
    summary = run.summary
    cells = {
        "running": str(summary.running),
        "ended": f"{summary.ended}/{run.num_planned}",
        "completed": str(summary.completed),
        "low-fidelity evaluations": str(summary.evaluated),
        "diverged": str(summary.diverged),
        "failed": str(summary.failed),
        "more seeds": _more_seeds(summary),
        "front": str(len(summary.front)),
        "hypervolume": _hypervolume(summary),
        "best perplexity": _best(run),
        "ETA": "-" if eta_s is None else format_seconds(eta_s),
    }
    result = Table(*cells)
    result.add_row(*cells.values())
    return result


@contextmanager
def shown(console: Console, state: Callable[[], Run], left_s: Callable[[], float]) -> Iterator[Callable[[], None]]:
    """Show the progress of a run; yield a function to call often, which updates it.

    state: returns the present run. left_s: returns the seconds until its time is up, infinite without a limit.
    """
    began_s, num_begun, num_shown, checked = time.monotonic(), len(state().finished), -1, -math.inf
    screen = Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext()

    def eta_s(run: Run) -> float | None:
        """Return the seconds left if the front stays the same, at most `left_s`; None if neither is known."""
        summary = run.summary
        ended_here = summary.ended + summary.replicates - num_begun
        left = max(0, run.num_planned - summary.ended) + summary.seeds_left
        pace_s = (time.monotonic() - began_s) / ended_here if ended_here > 0 else math.inf
        limit_s = until_s if (until_s := left_s()) > 0 else math.inf  # a first training may end after its time
        least_s = min(pace_s * left, limit_s) if left else 0.0
        return least_s if math.isfinite(least_s) else None

    def refresh(*, force: bool = False) -> None:
        nonlocal num_shown, checked
        if time.monotonic() - checked < REFRESH_S and not force:
            return
        checked, run = time.monotonic(), state()
        if isinstance(screen, Live):
            screen.update(table(run, eta_s(run)), refresh=True)
        elif (num_ended := run.summary.ended + run.summary.evaluated + run.summary.replicates) != num_shown:
            num_shown = num_ended
            console.print(line(run, eta_s(run)), soft_wrap=True, highlight=False)

    with screen:
        try:
            yield refresh
        finally:
            refresh(force=True)


def _best(run: Run) -> str:
    text = "-" if run.summary.best is None else f"{run.summary.best.perplexity:.2f}"
    return text if run.ngrams is None else f"{text} (trigram {run.ngrams.perplexity(TRIGRAM):.2f})"


def _hypervolume(summary: Summary) -> str:
    if summary.front and not summary.hypervolume:
        return "0 (no member beats the unigram model yet)"
    return f"{summary.hypervolume:.1f} s*nat"


def _more_seeds(summary: Summary) -> str:
    """Return the replicates that have ended, out of all that the present front needs."""
    return f"{summary.replicates}/{summary.replicates + summary.seeds_left}"


@contextmanager
def logged_to(console: Console) -> Iterator[None]:
    """Print the log messages of the package `nas`, from level INFO, on a console, one line each."""
    logger, handler = logging.getLogger("nas"), logging.Handler()
    handler.emit = lambda record: console.print(record.getMessage(), soft_wrap=True, highlight=False)  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


@contextmanager
def share_progress(console: Console, description: str) -> Iterator[Callable[[float], None]]:
    """Show a bar with the time left, or a line every LINE_EVERY_S seconds if there is no terminal.

    Yields a function that takes the share of the work done, from 0 to 1. The pace is measured from its first call,
    whose share may have been done before, by a process that was stopped.
    """
    if not console.is_terminal:
        first: tuple[float, float] | None = None
        last_s = time.monotonic()

        def tell(share: float) -> None:
            nonlocal first, last_s
            now_s = time.monotonic()
            first = first or (now_s, share)
            if now_s - last_s >= LINE_EVERY_S and share > first[1]:
                last_s = now_s
                left_s = (now_s - first[0]) * (1 - share) / (share - first[1])
                console.print(f"{description}: {share:.0%}, ETA {format_seconds(left_s)}")

        yield tell
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, speed_estimate_period=SPEED_OVER_S) as bar:
        task = bar.add_task(description, total=1.0)
        yield lambda share: bar.update(task, completed=share)
