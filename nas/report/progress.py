"""The progress of a run on a terminal: one live table, or plain lines when the output is not a terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from costmodel.config.units import format_seconds
from nas.corpus.ngrams import NgramBaseline
from nas.report.ngram_lines import beside_trigram
from nas.results.front import Summary

REFRESH_S = 1.0


def line(
    summary: Summary, total: int, eta_s: float | None, *, live: bool = True, ngrams: NgramBaseline | None = None
) -> str:
    """The state of a run in one line. live: whether a process works on it."""
    begun = f"{summary.running} {'running' if live else 'unfinished'}"
    return (
        f"{summary.ended}/{total} ended ({summary.completed} completed, {summary.stopped} stopped, "
        f"{summary.diverged} diverged, {summary.failed} failed), {_more_seeds(summary)}{begun}, "
        f"front {len(summary.front)}, hypervolume {_hypervolume(summary)}, "
        f"best perplexity in budget {_best(summary, ngrams)}, ETA {'-' if eta_s is None else format_seconds(eta_s)}"
    )


def table(summary: Summary, total: int, eta_s: float | None, ngrams: NgramBaseline | None = None) -> Table:
    """The state of a run as a table of one row."""
    cells = {
        "running": str(summary.running),
        "ended": f"{summary.ended}/{total}",
        "completed": str(summary.completed),
        "stopped": str(summary.stopped),
        "diverged": str(summary.diverged),
        "failed": str(summary.failed),
        "more seeds": f"{summary.replicates}/{summary.replicates + summary.seeds_left}",
        "front": str(len(summary.front)),
        "hypervolume": _hypervolume(summary),
        "best perplexity": _best(summary, ngrams),
        "ETA": "-" if eta_s is None else format_seconds(eta_s),
    }
    result = Table(*cells)
    result.add_row(*cells.values())
    return result


class Eta:
    """Seconds to the end, from the trials that ended since this process began; None until the first has.

    As if the front stayed as it is: its members lack seeds, those of another front may lack more.
    """

    def __init__(self, already_ended: int) -> None:
        self._already_ended = already_ended
        self._began = time.monotonic()

    def __call__(self, summary: Summary, total: int) -> float | None:
        ended_here = summary.ended + summary.replicates - self._already_ended
        if ended_here <= 0:
            return None
        left = max(0, total - summary.ended) + summary.seeds_left
        return (time.monotonic() - self._began) / ended_here * left


@contextmanager
def shown(
    console: Console, state: Callable[[], tuple[Summary, int]], eta: Eta, ngrams: NgramBaseline | None = None
) -> Iterator[Callable[[], None]]:
    """Yields a function to call when something may have changed; cheap to call often."""
    if not console.is_terminal:
        print_line = _lines(console, state, eta, ngrams)
        try:
            yield print_line
        finally:
            print_line(force=True)
        return
    with Live(console=console, auto_refresh=False) as live:
        last = 0.0

        def refresh() -> None:
            nonlocal last
            if time.monotonic() - last >= REFRESH_S:
                last = time.monotonic()
                summary, total = state()
                live.update(table(summary, total, eta(summary, total), ngrams), refresh=True)

        try:
            yield refresh
        finally:
            last = 0.0
            refresh()


def _best(summary: Summary, ngrams: NgramBaseline | None) -> str:
    return beside_trigram(None if summary.best is None else summary.best.perplexity, ngrams)


def _hypervolume(summary: Summary) -> str:
    if summary.front and not summary.hypervolume:
        return "0 (no member beats the unigram model yet)"
    return f"{summary.hypervolume:.1f} s*nat"


def _more_seeds(summary: Summary) -> str:
    """Trials of the front with more seeds: of as many as the front, as it is now, is to have."""
    if not summary.replicates and not summary.seeds_left:
        return ""
    return f"{summary.replicates}/{summary.replicates + summary.seeds_left} more seeds, "


class _Refresh(Protocol):
    def __call__(self, *, force: bool = False) -> None: ...


def _lines(
    console: Console, state: Callable[[], tuple[Summary, int]], eta: Eta, ngrams: NgramBaseline | None
) -> _Refresh:
    shown_ended, checked = -1, 0.0

    def refresh(*, force: bool = False) -> None:
        nonlocal shown_ended, checked
        if time.monotonic() - checked < REFRESH_S and not force:
            return
        checked = time.monotonic()
        summary, total = state()
        if summary.ended + summary.replicates != shown_ended:
            shown_ended = summary.ended + summary.replicates
            console.print(line(summary, total, eta(summary, total), ngrams=ngrams), soft_wrap=True, highlight=False)

    return refresh
