"""Compares predicted and measured compute seconds of whole decoders, with a process per party and nothing else running.

Every op of a model is measured by itself at its full size. Then the whole model runs several times, each time from the
start, so that both figures include start-up. The fastest run is compared with two predictions, by the testbed of single
ops and by the committed one. Kinds of op with a small share of the run are shown, but not judged. Measurements are
saved under `RUNS`, so that an interrupted experiment resumes.
"""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from costmodel.calibration.model_testbed import SESSION_S, measured_model
from costmodel.calibration.timed_run import check_engine
from costmodel.config.schema import decode
from costmodel.config.units import format_seconds
from costmodel.engine.compare import drawn_tokens, drawn_weights
from costmodel.engine.links import UNHINDERED, tcp
from costmodel.engine.spu import Job, graph_job, passes
from costmodel.errors import StoppedError, UserError
from costmodel.estimate import estimate
from costmodel.ops import OpGraph
from costmodel.protocols.compute_testbed import dump_compute, op_name
from costmodel.protocols.derived import Derived, load
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from experiments.bars import table
from nas.storage import RUNS, replace_file
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

SEED = 0
TOTAL = "total"
LOAD_FILE = Path("/proc/loadavg")
QUIET_LOAD = 0.5  # mean number of other threads that run or wait for a core before a run; more would disturb it
PROXY_EVALS, LOOK_S = 20, 0.1  # number of samples of the load, and seconds between them


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One protocol, with the relative errors allowed if every op was measured; the total may differ by its spread."""

    protocol: str
    layers: int
    total_bar: float
    kind_bar: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The experiment's YAML.

    `repeats` whole runs are made, at least 2. Kinds of op with at least `least_share` of the total are judged.
    `committed_bar` is the relative error allowed of totals by the committed testbeds, `least_inside` the share of
    totals and kinds that must lie in their ranges.
    """

    architecture: str
    base: str
    dimensions: Dimensions
    seq_len: int
    repeats: int
    cases: tuple[Case, ...]
    least_share: float
    committed_bar: float
    least_inside: float

    def __post_init__(self) -> None:
        if self.repeats < 2:
            raise UserError(f"`repeats` must be at least 2, to see a spread, but got {self.repeats}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A whole run: seconds by type of op and in total, and the load of other threads before it, None if not known."""

    by_kind: dict[str, float]
    load: float | None


class Line(NamedTuple):
    """A kind of op, or the total; `bar` is None if it is not judged. `error` is by the testbed of single ops."""

    kind: str
    measured_s: float
    spread: float
    model_s: float
    bar: float | None
    committed_s: float
    low_s: float
    high_s: float

    @property
    def error(self) -> float:
        return self.model_s / self.measured_s - 1

    @property
    def committed_error(self) -> float:
        return self.committed_s / self.measured_s - 1

    @property
    def inside(self) -> bool:
        return self.low_s <= self.measured_s <= self.high_s


def run(name: str, settings: Settings, console: Console) -> None:
    """Measure what is missing, and print a table per protocol.

    A StoppedError is raised if a bound is missed or the engine fails; run it again to resume.
    """
    missed, judged = [], list[Line]()
    for case in settings.cases:
        check_engine(case.protocol)
        lines, loads = measured_case(settings, case, name, console)
        console.print(case_table(case, lines))
        console.print(f"{_disturbed(loads)}\n")
        judged += [line for line in lines if line.bar is not None]
        missed += [f"{case.protocol} {text}" for text in misses(settings, lines)]
    inside = fmean(line.inside for line in judged)
    console.print(f"inside the committed testbeds' range: {inside:.0%} of {len(judged)} totals and kinds")
    if inside < settings.least_inside:
        missed.append(f"{inside:.0%} inside the range, not {settings.least_inside:.0%}")
    if missed:
        raise StoppedError(f"{len(missed)} bars are missed: {'; '.join(missed)}.")


def measured_case(settings: Settings, case: Case, name: str, console: Console) -> tuple[list[Line], list[float | None]]:
    """Return a line per kind of op, and the load of the machine before every whole run."""
    dimensions = replace(settings.dimensions, layers=case.layers)
    architecture = parse(settings.architecture, base_architecture(settings.base, dimensions)).architecture
    graph = lower(architecture, settings.seq_len)
    folder = RUNS / "experiments" / name / f"{case.protocol}-{_digest(graph)}"
    folder.mkdir(parents=True, exist_ok=True)
    committed = load(case.protocol, "loopback")
    console.print(f"{case.protocol}: {case.layers} layers, every op by itself", style="dim")
    testbed = measured_model([graph], case.protocol, committed.setting, folder / "timings.jsonl")
    path = folder / "testbed.yaml"
    path.write_text(dump_compute(testbed))
    runs = whole_runs(graph, case.protocol, settings.repeats, folder / "runs.jsonl", console)
    model = load(case.protocol, "loopback", path)
    return compared(settings, case, graph, runs, model, committed), [whole.load for whole in runs]


def whole_runs(graph: OpGraph, protocol: str, repeats: int, path: Path, console: Console) -> list[Run]:
    """Return `repeats` runs, starting with those in the file, to which each new one is saved at once."""
    texts = path.read_text().splitlines() if path.exists() else []
    runs = [decode(Run, json.loads(text), str(path)) for text in texts][:repeats]
    expected_s = SESSION_S + estimate(graph, load(protocol, "loopback")).total.latency_s
    while len(runs) < repeats:
        left_s = (repeats - len(runs)) * (runs[-1].by_kind[TOTAL] if runs else expected_s)
        console.print(f"{protocol}: run {len(runs) + 1} of {repeats}, about {format_seconds(left_s)} left", style="dim")
        runs.append(whole_run(graph, protocol, path))
        replace_file(path, "".join(json.dumps(asdict(whole)) + "\n" for whole in runs))
    return runs


def whole_run(graph: OpGraph, protocol: str, path: Path) -> Run:
    """Run the model once from the start; a StoppedError is raised if the engine fails."""
    load_before = others_running()
    try:
        (only,), _ = passes(drawn_job(graph, protocol), tcp, [UNHINDERED])
    except StoppedError as error:
        raise StoppedError(f"{error} What was measured so far is in {path.parent}; run the command again.") from None
    by_kind: dict[str, float] = defaultdict(float)
    for node, cost in zip(graph, only.by_op, strict=True):
        by_kind[type(node.op).__name__] += cost.seconds
    return Run(by_kind={**by_kind, TOTAL: only.seconds}, load=load_before)


def drawn_job(graph: OpGraph, protocol: str) -> Job:
    """Return the engine's job for a graph with random weights and tokens."""
    generator = np.random.default_rng(SEED)
    # in the engine's precision, to save memory: three parties hold GPT-2
    weights = {key: value.astype(np.float32) for key, value in drawn_weights(graph, generator).items()}
    tokens = drawn_tokens(graph, generator)
    return graph_job(graph, weights, tokens, protocol=protocol, setting=ENGINE_PROTOCOLS[protocol].setting())


def compared(
    settings: Settings, case: Case, graph: OpGraph, runs: Sequence[Run], model: Derived, committed: Derived
) -> list[Line]:
    """Compare the fastest run by kind, the slowest kind first and the total last."""
    fastest = min(runs, key=lambda whole: whole.by_kind[TOTAL]).by_kind
    kinds = sorted((kind for kind in fastest if kind != TOTAL), key=lambda kind: -fastest[kind])
    lines = []
    for kind in (*kinds, TOTAL):
        apart = (replace(node, inputs=("tokens",)) for node in graph if type(node.op).__name__ == kind)
        part = graph if kind == TOTAL else OpGraph(nodes=tuple(apart))
        column = [whole.by_kind[kind] for whole in runs]
        spread = (max(column) - min(column)) / min(column)
        bar: float | None = max(case.total_bar, spread) if kind == TOTAL else case.kind_bar
        if fastest[kind] < settings.least_share * fastest[TOTAL]:
            bar = None
        model_s, committed_s = (estimate(part, pricer).total.latency_s for pricer in (model, committed))
        range_s = committed.latency_s_range(part)
        assert range_s is not None
        lines.append(Line(kind, fastest[kind], spread, model_s, bar, committed_s, *range_s))
    return lines


def misses(settings: Settings, lines: Iterable[Line]) -> list[str]:
    """Describe the lines that exceed their bounds."""
    told = []
    for line in lines:
        if line.bar is not None and abs(line.error) > line.bar:
            told.append(f"{line.kind} {line.error:+.0%} of {line.bar:.0%}")
        if line.kind == TOTAL and abs(line.committed_error) > settings.committed_bar:
            told.append(f"committed {line.committed_error:+.0%} of {settings.committed_bar:.0%}")
    return told


def case_table(case: Case, lines: Iterable[Line]) -> Table:
    """Tabulate measured and predicted seconds, errors, and whether they lie in the committed range."""
    columns = ("op", "measured", "spread", "ops measured", "error", "bar", "committed", "error", "range", "inside")
    rows = [
        (
            line.kind,
            format_seconds(line.measured_s),
            f"{line.spread:.0%}",
            format_seconds(line.model_s),
            f"{line.error:+.0%}",
            "" if line.bar is None else f"{line.bar:.0%}",
            format_seconds(line.committed_s),
            f"{line.committed_error:+.0%}",
            f"{format_seconds(line.low_s)} to {format_seconds(line.high_s)}",
            "yes" if line.inside else "no",
        )
        for line in lines
    ]
    return table(columns, rows, title=f"{case.protocol}, {case.layers} layers")


def others_running() -> float | None:
    """Return the mean number of other threads that run or wait for a core, over a moment; None if it is not known.

    The load average is not used, because it still counts what this experiment has just done.
    """
    counts = []
    with suppress(OSError):
        for _ in range(PROXY_EVALS):
            counts.append(int(LOAD_FILE.read_text().split()[3].partition("/")[0]) - 1)
            time.sleep(LOOK_S)
        return fmean(counts)
    return None


def _disturbed(loads: Sequence[float | None]) -> str:
    known = [load for load in loads if load is not None]
    told = f"threads of others before the runs: {', '.join(f'{load:.1f}' for load in known) or 'unknown'}"
    return f"{told}; other work ran, so that these seconds say little" if max(known, default=0) > QUIET_LOAD else told


def _digest(graph: OpGraph) -> str:
    """Return a digest that identifies a graph, so that measurements of another one are not used for it."""
    return hashlib.sha256("\n".join(op_name(node.op, "secret") for node in graph).encode()).hexdigest()[:8]
