"""The progress of a run on a terminal: one live table, or plain lines when the output is not a terminal."""

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
LINE_EVERY_S = 30.0  # of progress, where no terminal shows a bar


def line(run: Run, eta_s: float | None, *, live: bool = True) -> str:
    """The state of a run in one line. live: whether a process works on it."""
    summary = run.summary
    unended = f"{summary.running} {'running' if live else 'unfinished'}"
    return (
        f"{summary.ended}/{run.num_planned} ended ({summary.completed} completed, {summary.diverged} diverged, "
        f"{summary.failed} failed), {summary.looked_at} looked at, {_more_seeds(summary)}{unended}, "
        f"front {len(summary.front)}, hypervolume {_hypervolume(summary)}, "
        f"best perplexity in budget {_best(run)}, ETA {'-' if eta_s is None else format_seconds(eta_s)}"
    )


def table(run: Run, eta_s: float | None) -> Table:
    """The state of a run as a table of one row."""
    summary = run.summary
    cells = {
        "running": str(summary.running),
        "ended": f"{summary.ended}/{run.num_planned}",
        "completed": str(summary.completed),
        "looked at": str(summary.looked_at),
        "diverged": str(summary.diverged),
        "failed": str(summary.failed),
        "more seeds": f"{summary.replicates}/{summary.replicates + summary.seeds_left}",
        "front": str(len(summary.front)),
        "hypervolume": _hypervolume(summary),
        "best perplexity": _best(run),
        "ETA": "-" if eta_s is None else format_seconds(eta_s),
    }
    result = Table(*cells)
    result.add_row(*cells.values())
    return result


@contextmanager
def shown(console: Console, state: Callable[[], Run]) -> Iterator[Callable[[], None]]:
    """Yields a function to call when something may have changed; cheap to call often. state: the run as it stands."""
    eta_s, num_shown, checked = _eta(state()), -1, -math.inf
    screen = Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext()

    def refresh(*, force: bool = False) -> None:
        nonlocal num_shown, checked
        if time.monotonic() - checked < REFRESH_S and not force:
            return
        checked, run = time.monotonic(), state()
        if isinstance(screen, Live):
            screen.update(table(run, eta_s(run)), refresh=True)
        elif (num_ended := run.summary.ended + run.summary.looked_at + run.summary.replicates) != num_shown:
            num_shown = num_ended
            console.print(line(run, eta_s(run)), soft_wrap=True, highlight=False)

    with screen:
        try:
            yield refresh
        finally:
            refresh(force=True)


def _eta(first: Run) -> Callable[[Run], float | None]:
    """Seconds to the end, from the trials that ended since the process began; None until one has.

    As if the front stayed as it is: its members lack seeds, those of another front may lack more. first: at the start.
    """
    start = time.monotonic()

    def eta_s(run: Run) -> float | None:
        summary = run.summary
        ended_here = summary.ended + summary.replicates - len(first.finished)
        if ended_here <= 0:
            return None
        left = max(0, run.num_planned - summary.ended) + summary.seeds_left
        return (time.monotonic() - start) / ended_here * left

    return eta_s


def _best(run: Run) -> str:
    """The best perplexity, or - for none, with the trigram's after it."""
    text = "-" if run.summary.best is None else f"{run.summary.best.perplexity:.2f}"
    return text if run.ngrams is None else f"{text} (trigram {run.ngrams.perplexity(TRIGRAM):.2f})"


def _hypervolume(summary: Summary) -> str:
    if summary.front and not summary.hypervolume:
        return "0 (no member beats the unigram model yet)"
    return f"{summary.hypervolume:.1f} s*nat"


def _more_seeds(summary: Summary) -> str:
    """Trials of the front with more seeds: of as many as the front, as it is now, is to have."""
    if not summary.replicates and not summary.seeds_left:
        return ""
    return f"{summary.replicates}/{summary.replicates + summary.seeds_left} more seeds, "


@contextmanager
def share_progress(console: Console, description: str) -> Iterator[Callable[[float], None]]:
    """Show a bar with the time left, or now and then a line where there is no terminal.

    Yields a function that takes the share of the work done, from 0 to 1.
    """
    if not console.is_terminal:
        yield _told_in_lines(console, description)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(description, total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _told_in_lines(console: Console, description: str) -> Callable[[float], None]:
    start = last = time.monotonic()

    def tell(share: float) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= LINE_EVERY_S and share > 0:
            last = now
            console.print(f"{description}: {share:.0%}, ETA {format_seconds((now - start) * (1 / share - 1))}")

    return tell
