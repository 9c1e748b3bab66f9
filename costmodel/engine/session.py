"""The parent's side of an engine run: starts a process per party, has them run passes, and ends them, come what may."""

import json
import pickle
import re
import selectors
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.engine.children import Child, last_words, log_file, started_child
from costmodel.engine.job import Job
from costmodel.engine.links import Condition, Link, Wiring
from costmodel.engine.party import JOB, RESULT, progress_file
from costmodel.execution.interpreter import Array

STARTS = 3  # a port that was free a moment ago may be taken
PORT_TAKEN = re.compile(r"[Aa]ddress already in use|[Ff]ail to listen|start failed")


class EngineError(RuntimeError):
    """The engine started and could not finish; the text says in which op, and at which party if they run apart."""


class _PortTakenError(EngineError):
    """A party could not listen where it was told to."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Passes:
    """What several passes of the same job left behind.

    times: by pass, by op, of each party, from when to when it ran it. peak_bytes: by pass, by op, the most memory that
    each process held, None where that is not known. logs: the engine's output, of each process.
    result: of the last op of the last pass, opened.
    """

    times: tuple[tuple[tuple[tuple[float, float], ...], ...], ...]
    peak_bytes: tuple[tuple[tuple[int | None, ...], ...], ...]
    logs: tuple[str, ...]
    result: Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Session:
    """Running children. deadline: of everything, by the monotonic clock."""

    folder: Path
    children: tuple[Child, ...]
    timeout_s: float | None
    deadline: float | None


def run_passes(job: Job, link: Link, conditions: Sequence[Condition], timeout_s: float | None) -> Passes:
    """Passes of a job, each under its condition of the link; what the engine sets up once is in the first.

    Raises EngineError if the engine fails or all of it takes longer than `timeout_s`; UserError from the link.
    """
    for attempt in range(STARTS):
        try:
            return _run_passes(job, link, conditions, timeout_s)
        except _PortTakenError:
            if attempt == STARTS - 1:
                raise
    raise AssertionError("unreachable")


def _run_passes(job: Job, link: Link, conditions: Sequence[Condition], timeout_s: float | None) -> Passes:
    with tempfile.TemporaryDirectory(prefix="engine-") as name, link(job.num_parties) as wiring:
        folder = Path(name)
        (folder / JOB).write_bytes(pickle.dumps(job))
        with _session(wiring, folder, job.setting.threads, timeout_s) as session:
            client, *others = session.children
            _tell(session, [client], "share")
            _tell(session, session.children, "connect", wiring.addresses)
            times, peaks = [], []
            for condition in conditions:
                wiring.set_condition(condition)
                by_child, held = zip(*_tell(session, session.children, "run"), strict=True)
                peaks.append(tuple(zip(*held, strict=True)))
                times.append(tuple(tuple(map(tuple, chain(*of_op))) for of_op in zip(*by_child, strict=True)))
            _tell(session, others, "save")
            _tell(session, [client], "open")
        logs = tuple(_log(folder, child) for child in session.children)
        return Passes(times=tuple(times), peak_bytes=tuple(peaks), logs=logs, result=np.load(folder / RESULT))


@contextmanager
def _session(wiring: Wiring, folder: Path, threads: int, timeout_s: float | None) -> Iterator[_Session]:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with ExitStack() as stack:
        children = tuple(
            stack.enter_context(started_child("costmodel.engine.party", folder, ranks, threads, prefix))
            for ranks, prefix in zip(wiring.groups, wiring.prefixes, strict=True)
        )
        yield _Session(folder=folder, children=children, timeout_s=timeout_s, deadline=deadline)


def _tell(session: _Session, children: Sequence[Child], command: str, *arguments: Any) -> list[Any]:
    """Has some children do something at once; their answers."""
    line = json.dumps([command, *arguments]).encode() + b"\n"
    for child in children:
        assert child.process.stdin is not None
        try:
            child.process.stdin.write(line)
            child.process.stdin.flush()
        except BrokenPipeError:
            raise _failure(session, child, command) from None
    return _answers(session, children, command)


def _answers(session: _Session, children: Sequence[Child], command: str) -> list[Any]:
    """One line from each; the others' end is noticed too, since nobody waits for a party that is gone."""
    found: dict[Child, Any] = {}
    with selectors.DefaultSelector() as selector:
        for child in session.children:
            selector.register(child.answers, selectors.EVENT_READ, child)
        while len(found) < len(children):
            left_s = None if session.deadline is None else max(0.0, session.deadline - time.monotonic())
            ready = [key.data for key, _ in selector.select(left_s)]
            if not ready:
                at = _at(session, next(child for child in children if child not in found))
                raise EngineError(f"the engine did not finish {at} in {session.timeout_s} s.")
            for child in ready:
                if not (line := child.answers.readline()):
                    raise _failure(session, child, command)
                found[child] = json.loads(line)
    return [found[child] for child in children]


def _failure(session: _Session, child: Child, command: str) -> EngineError:
    """What to say of a child that ended."""
    status, log = child.process.wait(), _log(session.folder, child)
    text = f"the engine failed (status {status}) in {_at(session, child)}: {last_words(log)}"
    return _PortTakenError(text) if command == "connect" and PORT_TAKEN.search(log) else EngineError(text)


def _at(session: _Session, child: Child) -> str:
    progress = progress_file(session.folder, child.ranks[0])
    op = repr(progress.read_text()) if progress.exists() else "none (it did not start)"
    return f"op {op}" + (f" at rank {child.ranks[0]}" if len(session.children) > 1 else "")


def _log(folder: Path, child: Child) -> str:
    return log_file(folder, child.ranks[0]).read_text(errors="replace")
