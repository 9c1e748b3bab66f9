"""Runs one trial in a worker process: trains a candidate, fully or up to the first rung, and reports events."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from platform import node
from typing import Any

import torch

from costmodel.config.bugs import described, traceback_kept
from costmodel.errors import UserError
from nas.conversion.fold import at_dimensions
from nas.conversion.parent import Parent, kept_parent
from nas.conversion.verified_fold import check_tokens, fold_as_far_as
from nas.corpus.corpus import Corpus
from nas.malloc import keep_freed_memory, release_freed_memory
from nas.model.decoder import Decoder
from nas.recipe.candidate import Candidate
from nas.run.folder import CONFIG_FILE, PARENT_FOLDER
from nas.run.ledger import Record
from nas.study.parent import deployable, trained_model
from nas.study.time_budget import Pace, paced
from nas.study.trials import RunHaltedError, Trial, over_timeout
from nas.training.batches import agreement, validate
from nas.training.checkpoint import load_latest_of
from nas.training.distillation.library import initial_weights
from nas.training.distillation.teacher import teacher_of
from nas.training.memory import TooLargeError
from nas.training.outcome import Outcome, VerifiedForm
from nas.training.trainer import train

NO_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG)
HANGS_S = 60.0  # time after the timeout when a trial that hangs (on a file, for example) is killed
TIMED_OUT = 75  # its exit code


def worker_env(threads: int) -> Mapping[str, str]:
    """Return environment variables for a new process, whose OpenMP and MKL will use at most `threads` threads."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def out_of_reach(trial: Trial) -> str | None:
    """Return why this machine cannot train (run folder or corpus not shared, no GPU); None if it can."""
    setting = trial.setting
    if not (setting.folder / CONFIG_FILE).is_file():
        return f"the run folder {setting.folder} is not on {node()}; all nodes must share it"
    for corpus in filter(None, (setting.corpus, setting.second)):
        try:
            int(corpus.tokens("validation")[-1])
        except (OSError, ValueError) as error:
            return f"the corpus {corpus.folder} is not on {node()} ({error}); all nodes must share the cache folder"
    if setting.device == "cuda" and not torch.cuda.is_available():
        return f"{node()} has no CUDA device that torch can use"
    return None


def run_trial(trial: Trial, on_pace: Callable[[Pace], None] = lambda pace: None) -> Iterator[Record]:
    """Train a candidate; yield a `rung` record per rung and one `finished` record. on_pace: called every few seconds.

    Errors of the candidate, timeouts and bugs become `failed` records with a reason; tracebacks of bugs are written
    into the trial's folder. Raises RunHaltedError for an OSError in NO_WRITE, such as a full disk; others become
    `failed` records too. A process that hangs for HANGS_S beyond the timeout is killed, and reports no record.
    """
    try:
        with _deadline(trial.setting.config.trial_timeout_s) as is_over:
            torch.set_num_threads(trial.setting.config.threads_per_trial or 1)
            keep_freed_memory()
            yield from _train(trial, is_over, on_pace)
    except (UserError, TooLargeError) as error:
        yield trial.ended("failed", " ".join(str(error).split()))
    except Exception as error:  # a bug must not end the run; its traceback is saved
        if isinstance(error, OSError) and error.errno in NO_WRITE:
            where = error.filename or trial.folder
            raise RunHaltedError(f"trial {trial.record.trial_id} stops at {where}: {error.strerror}") from error
        bug = "" if isinstance(error, OSError) else "bug: "
        yield trial.ended("failed", f"{bug}{described(error)}; {traceback_kept(error, trial.folder)}")


@contextmanager
def _deadline(timeout_s: float | None) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether the time is up. A process that hangs for HANGS_S longer is killed."""
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


def _train(trial: Trial, is_over: Callable[[], bool], on_pace: Callable[[Pace], None]) -> Iterator[Record]:
    candidate, setting, device = trial.candidate, trial.setting, trial.setting.device
    began_s, phases, initial, teacher = time.monotonic(), dict[str, float](), None, None
    if device == "cuda":
        torch.cuda.synchronize()  # makes the context, whose time is shown
        phases["CUDA"] = time.monotonic() - began_s
    if (parent := _parent(trial)) is not None:
        initial = initial_weights(parent, candidate, setting.corpus, device=device)
        teacher = teacher_of(parent, setting.corpus, candidate.recipe, device)
    del parent  # it is read again at the end, so that its weights need not be kept
    phases["initial weights"] = time.monotonic() - began_s - sum(phases.values())
    records = train(
        candidate,
        setting.corpus,
        seed=trial.record.seed,
        folder=trial.folder,
        device=device,
        initial=initial,
        teacher=teacher,
        stop=paced(is_over, on_pace, phases),
    )
    del initial, teacher  # `records` has them, as long as it needs them
    for measured in records:
        if isinstance(measured, Outcome):
            records.close()  # frees the training's memory, since checking a fold takes as much
            release_freed_memory()
            checked = _checked(trial) if measured.status == "completed" else {}
            yield trial.ended(measured.status, measured.reason, measured=measured, **checked)
            return
        yield trial.at_rung(measured)
        if trial.record.is_proxy and measured.share < 1:
            records.close()
            reason = f"low-fidelity evaluation, after {measured.share:.0%} of the tokens"
            yield trial.ended("paused", reason, measured=measured)
            return
    timeout_s = setting.config.trial_timeout_s
    assert timeout_s is not None
    yield trial.ended("failed", over_timeout(timeout_s))


def _checked(trial: Trial) -> dict[str, Any]:
    """Return the verified form of a completed trial, its losses on the second corpus, and agreement with the parent."""
    candidate, setting, scale = trial.candidate, trial.setting, trial.candidate.recipe.scale

    def model() -> Decoder:
        return trained_model(candidate, load_latest_of(trial.folder, candidate)).eval().to(setting.device)

    checked: dict[str, Any] = {}
    if trial.record.deployed is not None:
        checked["verified"] = verified_form(candidate, setting.corpus, trial.folder, trial.record.protocol)
    if setting.second is not None:
        checked["second"] = validate(model(), setting.second, scale).documents
    if (parent := _parent(trial)) is not None:
        theirs = parent.decoder().to(setting.device)
        checked["agreement"] = agreement(model(), theirs, setting.corpus, scale)
    return checked


def verified_form(candidate: Candidate, corpus: Corpus, folder: Path, protocol: str) -> VerifiedForm:
    """Return the folded form of a completed trial's model, folded as far as the check in fixed point allows.

    folder: the trial's folder. Raises UserError if it has no whole checkpoint of the candidate.
    """
    _, tokens = check_tokens(corpus, candidate.trained.vocab_size, candidate.recipe.scale.seq_len)
    architecture, weights, left = deployable(candidate, load_latest_of(folder, candidate), corpus)
    folded, check = fold_as_far_as(architecture, weights, tokens, protocol)
    return VerifiedForm(
        architecture=at_dimensions(folded.architecture, candidate.architecture),
        left=(*left, *folded.left, *check.outside),
        logits_error=check.float_error,
        fixed_point_error=check.fixed_error,
        trained_fixed_point_error=check.trained_fixed_error,
        top1_agreement=check.agreement,
        holds=check.passes,
    )


def _parent(trial: Trial) -> Parent | None:
    folder, distillation = trial.setting.folder / PARENT_FOLDER, trial.candidate.recipe.distillation
    return None if distillation is None else kept_parent(folder, str(folder), distillation.parent)
