"""The Ray Tune adapter: asks for trials, runs each in a worker process, and hands every event back.

Nothing here decides anything: proposals, early stops and records come from `Trials` and `run_trial`.
"""

import logging
import math
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle, tune
from ray._private import ray_constants
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError
from ray.tune.error import TuneError
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from costmodel.config.bugs import described, headed, traceback_kept
from nas.study.trials import Trials, TrialSpec

# Ray keeps quiet, reports nothing home and leaves the files to us.
QUIET_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C must reach us, not wait for running trials
    "TUNE_MAX_PENDING_TRIALS_PG": "1",  # ask for a trial only when a worker is free
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # our searcher has no single metric
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths mean the same in a worker as here
}
REACHED_WITHIN_S = 10.0
OBJECT_STORE_BYTES = 100_000_000  # trials exchange a few kilobytes; Ray would reserve 30 % of the memory
DEAD_WORKER = (RayActorError, WorkerCrashedError, OutOfMemoryError)
ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class RunHaltedError(RuntimeError):
    """The machine, not a candidate, keeps the run from going on; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What trials run on.

    max_concurrent: trials at a time; threads_per_trial: torch threads of each.
    num_gpus: of this machine; gpus_per_trial: whole, or a fraction that several trials share.
    ray_address: an existing cluster (whose nodes share the run folder), or None for this machine alone.
    """

    max_concurrent: int
    threads_per_trial: int
    num_gpus: int = 0
    gpus_per_trial: float = 0.0
    ray_address: str | None = None


def run_study(
    trials: Trials,
    resources: Resources,
    *,
    worker_env: Mapping[str, str],
    time_budget_s: float | None = None,
    on_change: Callable[[], None] = lambda: None,
) -> None:
    """Runs trials until the schedule is finished or the time is up; `on_change` is called as things happen.

    Raises RunHaltedError if the run cannot go on (it can be resumed), KeyboardInterrupt on Ctrl-C.
    """
    os.environ.update(QUIET_ENV)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    _start_ray(resources, worker_env)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own ends the process, whatever is to be saved
    try:
        with tempfile.TemporaryDirectory(prefix="nas-tune-") as scratch:
            _fit(trials, resources, scratch, time_budget_s, on_change)
    finally:
        ray.shutdown()
    if trials.halted:
        raise RunHaltedError(trials.halted)


def _start_ray(resources: Resources, worker_env: Mapping[str, str]) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    if resources.ray_address is not None:
        _check_reachable(resources.ray_address)
    local: dict[str, Any] = {}
    # Ray has no public switch on Linux to stay off the network; this one makes it bind to loopback only.
    ray_constants.ENABLE_RAY_CLUSTER = resources.ray_address is not None
    if resources.ray_address is None:
        local = {
            "num_cpus": resources.max_concurrent * resources.threads_per_trial,
            "num_gpus": resources.num_gpus,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
    try:
        ray.init(
            address=resources.ray_address or "local",  # whatever RAY_ADDRESS says
            runtime_env={"env_vars": dict(worker_env)},
            logging_level=logging.ERROR,
            log_to_driver=False,
            **local,
        )
    except (OSError, RuntimeError, ValueError) as error:  # Ray's types for what its own processes run into
        where = "on this machine" if resources.ray_address is None else f"at {resources.ray_address}"
        raise RunHaltedError(f"Ray cannot be reached {where}: {described(error)}") from error


def _check_reachable(address: str) -> None:
    """Ray itself takes more than a minute to find that nobody listens. Raises RunHaltedError."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:  # `auto`
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED_WITHIN_S).close()
    except (OSError, OverflowError) as error:
        reason = f"nobody answers within {REACHED_WITHIN_S:.0f} s ({error})"
        raise RunHaltedError(f"Ray cannot be reached at {address}: {reason}") from None


def _fit(
    trials: Trials, resources: Resources, scratch: str, time_budget_s: float | None, on_change: Callable[[], None]
) -> None:
    trainable = tune.with_resources(_trainable, {"CPU": resources.threads_per_trial, "GPU": resources.gpus_per_trial})
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=_Asker(trials),
            num_samples=-1,
            max_concurrent_trials=resources.max_concurrent,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="study",
            storage_path=scratch,
            verbose=0,
            callbacks=[_Recorder(trials, on_change)],
            stop=_Stopper(trials, time_budget_s),
        ),
    )
    try:
        tuner.fit()
    except TuneError as error:  # of what a callback of ours raises, Tune keeps the text alone
        if isinstance(error.__context__, Exception):
            raise error.__context__ from None
        raise


def _trainable(config: dict[str, Any]) -> None:
    """One trial in a worker process; every event goes back through Tune."""
    from nas.study.worker import run_trial

    for event in run_trial(config["spec"]):
        tune.report({"trial_event": event})


class _Unpickled:
    """Tune pickles its parts for a restore of its own; ours hold live state, and the ledger is what is resumed."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return object, ()


class _Asker(_Unpickled, Searcher):
    """Tune's view of the schedule."""

    def __init__(self, trials: Trials) -> None:
        super().__init__(metric="unused", mode="min")
        self._trials = trials

    def suggest(self, trial_id: str) -> Any:
        if self._trials.halted:
            return Searcher.FINISHED
        spec = self._trials.next_spec()
        if spec is None:
            return Searcher.FINISHED if self._trials.finished else None
        return {"spec": spec}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing: the recorder tells the schedule."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the only state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the only state."""


class _Recorder(_Unpickled, tune.Callback):
    """Tune's events to the ledger."""

    def __init__(self, trials: Trials, on_change: Callable[[], None]) -> None:
        self._trials = trials
        self._on_change = on_change

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._trials.started(_spec(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        if event := result.get("trial_event"):
            self._trials.happened(_spec(trial), event)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        spec = _spec(trial)
        self._trials.lost(spec, loss_reason(_error_of(trial), spec.folder))

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        self._on_change()


class _Stopper(_Unpickled, tune.Stopper):
    """Ends the run when it is halted or its time is up; unfinished trials stay resumable."""

    def __init__(self, trials: Trials, time_budget_s: float | None) -> None:
        self._trials = trials
        self._deadline = math.inf if time_budget_s is None else time.monotonic() + time_budget_s

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return bool(self._trials.halted) or time.monotonic() >= self._deadline


def loss_reason(error: Exception, folder: Path) -> str:
    """Why a trial ended without a word, given what Ray has of it; a traceback is written into the trial's folder."""
    if isinstance(error, DEAD_WORKER):
        return "the worker process died (out of memory?)"
    cause = error.cause if isinstance(error, RayTaskError) else error
    text = ANSI_COLOURS.sub("", str(error))  # Ray's own, with the lines of the worker
    return f"bug: {described(cause)}; {traceback_kept(headed(text), folder)}"


def _error_of(trial: Trial) -> Exception:
    """What a trial failed with: `Trial.get_error` reads the run's storage, where it is only after this callback."""
    path = trial.pickled_error_file or trial.error_file
    if path is None:
        return TuneError("Ray gives no reason")
    if path == trial.error_file:
        return TuneError(Path(path).read_text(encoding="utf-8", errors="replace"))
    error = cloudpickle.loads(Path(path).read_bytes())
    assert isinstance(error, Exception)
    return error


def _spec(trial: Trial) -> TrialSpec:
    spec = trial.config["spec"]
    assert isinstance(spec, TrialSpec)
    return spec
