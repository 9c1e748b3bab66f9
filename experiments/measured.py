"""Speeds of training steps measured side by side, and their rows: printed and written to a file one by one."""

import csv
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch._dynamo.utils import counters

from costmodel.calibration.fits import processor
from costmodel.errors import StoppedError
from nas.malloc import release_freed_memory

COLUMNS = ("part", "name", "value", "unit", "card", "torch", "date")
WARM_UP = {"cpu": 2, "cuda": 12}  # steps before the measured ones, in which code is compiled and kernels are chosen
GIB = 2**30


class Rows:
    """The rows of an experiment, written to a CSV file. A part that fails or exceeds its time does not stop the others.

    path: the file, which is emptied at once; its folder must exist. device: `cuda` or `cpu`; the name of the GPU or of
    the processor is in every row. failed: names of the parts that have failed so far. Whether the time of a part is
    over is checked only when `left_s` is read.
    """

    def __init__(self, path: Path, device: str, console: Console) -> None:
        self.path, self.console, self.failed = path, console, list[str]()
        self._card = torch.cuda.get_device_name() if device == "cuda" else processor()
        self._part, self._ends_s = "", float("inf")
        path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")

    def add(self, name: str, value: float | None, unit: str) -> None:
        """Print a row of the present part, and append it to the file. value: None if the part failed."""
        text = "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
        self.console.print(f"{self._part}: {name}: {text} {unit}", soft_wrap=True, highlight=False)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            written = self._part, name, text, unit, self._card, torch.__version__, datetime.now(UTC).date().isoformat()
            csv.writer(file, lineterminator="\n").writerow(written)

    @contextmanager
    def part(self, name: str, ends_s: float) -> Iterator[None]:
        """Measure a part in a block, until `ends_s` of `time.monotonic`; an exception is printed, and becomes a row."""
        self._part, self._ends_s, since_s = name, ends_s, time.monotonic()
        try:
            yield
        except Exception as error:
            self.fail(error)
        self.add("the whole part", time.monotonic() - since_s, "s")

    def fail(self, error: Exception, subject: str = "") -> None:
        """Print an error, write a row about it, and count the present part as failed. subject: what failed, or ''."""
        self.console.print("".join(traceback.format_exception(error)), soft_wrap=True, highlight=False)
        if self._part not in self.failed:
            self.failed.append(self._part)
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        self.add(f"{subject}: {reason}" if subject else reason, None, "failed")

    @property
    def left_s(self) -> float:
        """Seconds that are left for the present part. Raises StoppedError if there are none."""
        if (left_s := self._ends_s - time.monotonic()) <= 0:
            raise StoppedError(f"the time of part {self._part} is over; give it more with fewer --parts at a time.")
        return left_s


class Way(NamedTuple):
    """A way of training. tokens: tokens of a step. start: returns a context, whose value takes a step when called.

    predicted_bytes: predicted memory, without the CUDA context; None if not predicted.
    """

    name: str
    tokens: int
    start: Callable[[], AbstractContextManager[Callable[[], object]]]
    predicted_bytes: int | None = None


class Speed(NamedTuple):
    """Measured speed of a way of training. rates: tokens a second, by round. start_s: seconds until the warm-up ended.

    num_recompiled: graphs compiled after the warm-up. peak_bytes: peak memory of tensors on a GPU; None on a CPU.
    """

    rates: list[float]
    start_s: float
    num_recompiled: int
    peak_bytes: int | None


def speeds(ways: Iterable[Way], device: str, *, rounds: int, burst_s: float, rows: Rows) -> Iterator[tuple[Way, Speed]]:
    """Yield the ways of training that could be measured, with their speeds over `rounds` rounds of `burst_s` seconds.

    On a GPU, ways are measured one after the other, so that each has the whole memory. On a CPU they take turns, so
    that other work on the machine affects them equally; if one fails there, none is yielded. `rows` gets the errors.
    Raises StoppedError if the time of the part is over before ways are measured.
    """
    groups = [(way,) for way in ways] if device == "cuda" else [tuple(ways)]
    for group in groups:
        rows.left_s  # noqa: B018  # raises
        measured: list[Speed] = []
        try:
            measured = _together(group, device, rounds, burst_s)
        except Exception as error:
            rows.fail(error, ", ".join(way.name for way in group))
        release_freed_memory()
        if device == "cuda":
            torch.cuda.empty_cache()
        yield from zip(group, measured, strict=False)  # none of a group that failed


def _together(ways: Sequence[Way], device: str, rounds: int, burst_s: float) -> list[Speed]:
    is_cuda = device == "cuda"
    synchronize: Callable[[], None] = torch.cuda.synchronize if is_cuda else lambda: None
    before = torch.cuda.memory_allocated() if is_cuda else 0
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    with ExitStack() as stack:
        steps, starts_s = [], []
        for way in ways:
            since_s = time.perf_counter()
            step = stack.enter_context(way.start())
            for _ in range(WARM_UP[device]):
                step()
            synchronize()
            steps.append(step)
            starts_s.append(time.perf_counter() - since_s)
        rates, num_recompiled = [list[float]() for _ in ways], [0] * len(ways)
        for _ in range(rounds):
            for index, (way, step) in enumerate(zip(ways, steps, strict=True)):
                num_graphs, count, since_s = num_compiled(), 0, time.perf_counter()
                while not count or time.perf_counter() - since_s < burst_s:
                    step()
                    count += 1
                synchronize()
                rates[index].append(count * way.tokens / (time.perf_counter() - since_s))
                num_recompiled[index] += num_compiled() - num_graphs
        peak = torch.cuda.max_memory_allocated() - before if is_cuda else None
    return [Speed(*numbers, peak) for numbers in zip(rates, starts_s, num_recompiled, strict=True)]


def num_compiled() -> int:
    """Return the number of graphs that torch.compile compiled in this process so far."""
    return int(counters["stats"]["unique_graphs"])
