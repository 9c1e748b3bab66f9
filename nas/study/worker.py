"""One trial in a worker process: trains a candidate, to its end or up to a look, and reports events."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from platform import node
from typing import Any

import torch

from costmodel.config.bugs import described, report, traceback_kept
from costmodel.errors import UserError
from nas.conversion.parent import kept_parent
from nas.malloc import keep_freed_memory, release_freed_memory
from nas.run.config import THREADS_PER_TRIAL
from nas.run.folder import CONFIG_FILE
from nas.study.trials import TrialEvent, TrialSpec, over_timeout
from nas.study.verify_fold import second_documents, verified_form
from nas.training.distillation.library import initial_weights
from nas.training.distillation.teacher import teacher_of
from nas.training.memory import TooLargeError
from nas.training.outcome import Outcome
from nas.training.trainer import train

NO_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG)
HANGS_S = 60.0  # after its time a trial that takes no step, on a file that does not come, say, is ended
TIMED_OUT = 75  # the exit code of that


def worker_env(threads: int) -> Mapping[str, str]:
    """Environment that a worker process starts in: as many threads as it may use."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def out_of_reach(spec: TrialSpec) -> str | None:
    """Why this machine cannot train: it does not see the run's folder or the corpus, or its GPU is gone; else None."""
    run_folder = spec.folder.parents[1]
    if not (run_folder / CONFIG_FILE).is_file():
        return f"the run folder {run_folder} is not on {node()}; all nodes must share it"
    for corpus in filter(None, (spec.corpus, spec.second)):
        try:
            int(corpus.tokens("validation")[-1])
        except (OSError, ValueError) as error:
            return f"the corpus {corpus.folder} is not on {node()} ({error}); all nodes must share the cache folder"
    if spec.device == "cuda" and not torch.cuda.is_available():
        return f"{node()} has no CUDA device that torch can use"
    return None


def run_trial(spec: TrialSpec) -> Iterator[TrialEvent]:
    """Trains the candidate of `spec`; yields a `rung` event per rung and one `finished` event.

    What goes wrong with the candidate is a `failed` event with a reason, and so is a bug, whose traceback is written
    into the trial's folder; what goes wrong with the machine (disk full) is a `halted` event, after which the run must
    stop.
    """
    try:
        with _deadline(spec.timeout_s) as is_over:
            torch.set_num_threads(THREADS_PER_TRIAL)
            keep_freed_memory()
            yield from _train(spec, is_over)
    except (UserError, TooLargeError) as error:
        yield _failed(" ".join(str(error).split()))
    except Exception as error:  # of any type: the run goes on, and its user finds the traceback
        if isinstance(error, OSError) and error.errno in NO_WRITE:
            reason = f"trial {spec.trial_id} stops at {error.filename or spec.folder}: {error.strerror}"
            yield TrialEvent(event=None, status="failed", halted=True, reason=reason)
            return
        bug = "" if isinstance(error, OSError) else "bug: "
        yield _failed(f"{bug}{described(error)}; {traceback_kept(report(error), spec.folder)}")


def _failed(reason: str) -> TrialEvent:
    return TrialEvent(event="finished", status="failed", reason=reason, elsewhere=True)


@contextmanager
def _deadline(timeout_s: float | None) -> Iterator[Callable[[], bool]]:
    """Yields whether the time is up. A process that does not ask within HANGS_S more ends there and then."""
    if timeout_s is None:
        yield lambda: False
        return
    ends_s = time.monotonic() + timeout_s
    watchdog = threading.Timer(timeout_s + HANGS_S, os._exit, (TIMED_OUT,))
    watchdog.daemon = True
    watchdog.start()
    try:
        yield lambda: time.monotonic() >= ends_s
    finally:
        watchdog.cancel()


def _train(spec: TrialSpec, is_over: Callable[[], bool]) -> Iterator[TrialEvent]:
    records = train(
        spec.candidate,
        spec.corpus,
        seed=spec.seed,
        folder=spec.folder,
        device=spec.device,
        stop=is_over,
        **_parent_of(spec),
    )
    for record in records:
        if isinstance(record, Outcome):
            records.close()  # and with it what trained, as checking a fold takes as much
            release_freed_memory()
            whole, second = record.status == "completed", spec.second
            folds = whole and spec.deployed is not None
            yield TrialEvent(
                event="finished",
                status=record.status,
                reason=record.reason,
                measured=record,
                verified=verified_form(spec.candidate, spec.corpus, spec.folder) if folds else None,
                second=second_documents(spec.candidate, second, spec.folder, spec.device) if whole and second else (),
            )
            return
        yield TrialEvent(event="rung", status="running", measured=record)
        if spec.is_look and record.share < 1:
            records.close()
            reason = f"looked at, after {record.share:.0%} of the tokens"
            yield TrialEvent(event="finished", status="paused", reason=reason, measured=record)
            return
    assert spec.timeout_s is not None
    yield TrialEvent(event="finished", status="failed", reason=over_timeout(spec.timeout_s))


def _parent_of(spec: TrialSpec) -> dict[str, Any]:
    """Arguments of training that come from the parent."""
    route = spec.candidate.recipe.route
    if route is None or spec.parent is None:
        return {}
    parent = kept_parent(spec.parent, str(spec.parent), route.parent)
    return {
        "initial": initial_weights(parent, spec.candidate, spec.corpus, device=spec.device),
        "teacher": teacher_of(parent, spec.corpus, spec.candidate.recipe, spec.device),
    }
