"""The Ray Tune adapter: asks for trials, runs each in a worker process, and hands every event back.

Nothing here decides anything: proposals, early stops and records come from `Trials` and `run_trial`.
"""

import math
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle, tune
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError
from ray.tune.error import TuneError
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from costmodel.config.bugs import described, headed, traceback_kept
from nas.run.config import THREADS_PER_TRIAL
from nas.study.finalists import Key
from nas.study.ray_cluster import alive_nodes, ray_session
from nas.study.resources import Resources
from nas.study.trials import RunHaltedError, TrialEvent, Trials, TrialSpec, over_timeout
from nas.study.worker import out_of_reach, run_trial, worker_env

DEAD_WORKER = (RayActorError, WorkerCrashedError, OutOfMemoryError)
ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
NODE_LABEL = "ray.io/node-id"  # which Ray gives every node
MOST_NODES = 3  # on which the same trial fails: then it is the trial


def run_trials(
    trials: Trials,
    resources: Resources,
    *,
    time_budget_s: float | None = None,
    on_change: Callable[[], None] = lambda: None,
) -> None:
    """Runs trials until the schedule is finished or the time is up; `on_change` is called as things happen.

    Raises RunHaltedError if the run cannot go on (it can be resumed), KeyboardInterrupt on Ctrl-C.
    """
    with (
        ray_session(resources, worker_env(THREADS_PER_TRIAL)),
        tempfile.TemporaryDirectory(prefix="nas-tune-") as scratch,
    ):
        _fit(trials, resources, scratch, time_budget_s, _Places(trials, resources), on_change)
    if trials.halted:
        raise RunHaltedError(trials.halted)


def _fit(
    trials: Trials,
    resources: Resources,
    scratch: str,
    time_budget_s: float | None,
    places: "_Places",
    on_change: Callable[[], None],
) -> None:
    tuner = tune.Tuner(
        tune.with_resources(_trainable, _requested),
        tune_config=tune.TuneConfig(
            search_alg=_Asker(trials, places),
            num_samples=-1,
            max_concurrent_trials=resources.max_concurrent,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(
            name="study",
            storage_path=scratch,
            verbose=0,
            callbacks=[_Recorder(trials, places, on_change)],
            stop=_Stopper(trials, time_budget_s),
        ),
    )
    try:
        tuner.fit()
    except RuntimeError as error:
        if isinstance(error.__cause__, OutOfMemoryError):  # while an actor is made, Tune hands it on
            raise RunHaltedError(
                f"this machine ran out of memory ({str(error.__cause__).splitlines()[0]}); train fewer at a time "
                "(--max-concurrent) or end what else runs"
            ) from error
        raise
    except TuneError as error:  # of what a callback of ours raises, Tune keeps the text alone
        if isinstance(error.__context__, Exception):
            raise error.__context__ from None
        raise


class _Places:
    """Where trials are, and which nodes each failed on: it is tried on others, on MOST_NODES in all."""

    def __init__(self, trials: Trials, resources: Resources) -> None:
        self._trials = trials
        self._bundle = {"CPU": THREADS_PER_TRIAL, "GPU": resources.gpus_per_trial}
        self._is_cluster = resources.ray_address is not None
        self._failed_on: dict[Key, set[str]] = {}
        self._waiting: set[Key] = set()  # to be tried again, and not started yet
        self._began_s: dict[Key, float] = {}
        self._node: dict[Key, str] = {}

    def request(self, spec: TrialSpec) -> dict[str, Any]:
        """The configuration of a trial for Tune: plain data, as Tune makes its resources of a copy."""
        failed_on = sorted(self._failed_on.get(spec.proposal.key, ()))
        return {"spec": spec, "bundle": self._bundle, "not_on": failed_on, "is_cluster": self._is_cluster}

    def check(self) -> None:
        """Halts the run if a trial waits for a node that it has not failed on, and there is none any more."""
        for key in self._waiting:
            if {node.node_id for node in alive_nodes()} <= self._failed_on[key]:
                self._trials.halted = "no node is left to train on: a trial has failed on all that are there"
                return

    def started(self, spec: TrialSpec) -> None:
        self._waiting.discard(spec.proposal.key)
        self._began_s[spec.proposal.key] = time.monotonic()

    def is_on(self, spec: TrialSpec, node_id: str) -> None:
        self._node[spec.proposal.key] = node_id

    def is_tried_elsewhere(self, spec: TrialSpec, event: TrialEvent) -> bool:
        """Whether a trial that has ended is to be tried on another node."""
        key = spec.proposal.key
        node_id = self._node.pop(key, None)
        if not (self._is_cluster and event.status == "failed" and event.elsewhere and node_id):
            return False
        failed_on = self._failed_on.setdefault(key, set())
        failed_on.add(node_id)
        others = {node.node_id for node in alive_nodes()} - failed_on
        if len(failed_on) >= MOST_NODES or not others:
            return False
        self._waiting.add(key)
        return True

    def seconds(self, spec: TrialSpec) -> float:
        """Since a trial was started."""
        return time.monotonic() - self._began_s.get(spec.proposal.key, math.inf)


def _requested(config: dict[str, Any]) -> tune.PlacementGroupFactory:
    """The resources that a trial takes of a node, and the nodes it must not be on."""
    selector = {NODE_LABEL: f"!in({','.join(config['not_on'])})"} if config["not_on"] else {}
    return tune.PlacementGroupFactory([config["bundle"]], bundle_label_selector=[selector])


def _trainable(config: dict[str, Any]) -> None:
    """One trial in a worker process; every event goes back through Tune."""
    tune.report({"node": ray.get_runtime_context().get_node_id()})
    spec: TrialSpec = config["spec"]
    if config["is_cluster"] and (reason := out_of_reach(spec)):
        failed = TrialEvent(event="finished", status="failed", reason=reason, elsewhere=True)
        tune.report({"trial_event": failed})
        return
    for event in run_trial(spec):
        tune.report({"trial_event": event})


class _Unpickled:
    """Tune pickles its parts for a restore of its own; ours hold live state, and the ledger is what is resumed."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return object, ()


class _Asker(_Unpickled, Searcher):
    """Tune's view of the schedule."""

    def __init__(self, trials: Trials, places: _Places) -> None:
        super().__init__(metric="unused", mode="min")
        self._trials, self._places = trials, places

    def suggest(self, trial_id: str) -> Any:
        if self._trials.halted:
            return Searcher.FINISHED
        spec = self._trials.next_spec()
        if spec is None:  # what is running may be lost, and is asked for again then
            return Searcher.FINISHED if self._trials.finished and not self._trials.running else None
        return self._places.request(spec)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Nothing: the recorder tells the schedule."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the only state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: the ledger is the only state."""


class _Recorder(_Unpickled, tune.Callback):
    """Tune's events to the ledger."""

    def __init__(self, trials: Trials, places: _Places, on_change: Callable[[], None]) -> None:
        self._trials, self._places = trials, places
        self._on_change = on_change

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._places.started(_spec(trial))
        self._trials.started(_spec(trial))

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        if node_id := result.get("node"):
            self._places.is_on(_spec(trial), node_id)
        if event := result.get("trial_event"):
            self._happened(_spec(trial), event)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        spec, error = _spec(trial), _error_of(trial)
        reason = loss_reason(error, spec.folder)
        if not isinstance(error, DEAD_WORKER):
            self._happened(spec, TrialEvent(event="finished", status="failed", reason=reason, elsewhere=True))
        elif spec.timeout_s is not None and self._places.seconds(spec) >= spec.timeout_s:
            self._happened(spec, TrialEvent(event="finished", status="failed", reason=over_timeout(spec.timeout_s)))
        else:
            self._trials.lost(spec, reason)

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        self._places.check()
        self._on_change()

    def _happened(self, spec: TrialSpec, event: TrialEvent) -> None:
        again = event.event == "finished" and self._places.is_tried_elsewhere(spec, event)
        self._trials.happened(spec, event, again=again)


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
    """The error of a trial: `Trial.get_error` reads the run's storage, where it is only after this callback."""
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
