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
from nas.study.nodes import Fleet, Question
from nas.study.ray_cluster import NodeWatch, ray_session
from nas.study.resources import Resources
from nas.study.trials import RunHaltedError, TrialEvent, Trials, TrialSpec, over_timeout
from nas.study.worker import run_trial, worker_env

DEAD_WORKER = (RayActorError, WorkerCrashedError, OutOfMemoryError)
ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
ON_ONE_OF = "ray.io/node-id"  # a label that Ray gives every node


def run_trials(
    trials: Trials,
    resources: Resources,
    *,
    time_budget_s: float | None = None,
    on_change: Callable[[], None] = lambda: None,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Runs trials until the schedule is finished or the time is up; `on_change` is called as things happen.

    log: takes a line of each node that is left out.

    Raises RunHaltedError if the run cannot go on (it can be resumed), KeyboardInterrupt on Ctrl-C.
    """
    with (
        ray_session(resources, worker_env(THREADS_PER_TRIAL)),
        tempfile.TemporaryDirectory(prefix="nas-tune-") as scratch,
    ):
        _fit(trials, resources, scratch, time_budget_s, _Places(trials, resources, log), on_change)
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
    """Nodes on which trials are, and may be. On this machine alone there is nothing to choose."""

    def __init__(self, trials: Trials, resources: Resources, log: Callable[[str], None]) -> None:
        self._trials, self._log = trials, log
        self._bundle = {"CPU": THREADS_PER_TRIAL, "GPU": resources.gpus_per_trial}
        self.fleet = Fleet()
        self._watch: NodeWatch | None = None
        self._waiting: dict[Key, tuple[str, ...]] = {}  # asked for, not started: where it may be
        self._began_s: dict[Key, float] = {}
        self._node: dict[Key, str] = {}
        if resources.ray_address is not None:
            setting = trials.setting
            asked = Question(folder=setting.folder, corpus=setting.corpus, device=setting.device, second=setting.second)
            self._watch = NodeWatch(self.fleet, asked, resources.gpus_per_trial, log)

    def request(self, spec: TrialSpec) -> dict[str, Any]:
        """The configuration of a trial for Tune: plain data, as Tune makes its resources of a copy."""
        nodes = self.fleet.nodes_for(spec.proposal.key)
        if self._watch is not None:
            self._waiting[spec.proposal.key] = nodes
        return {"spec": spec, "bundle": self._bundle, "nodes": nodes}

    def are_known(self) -> bool:
        """Whether there is a node to ask a trial for; halts the run where there will be none."""
        if self._watch is None:
            return True
        self._watch.poll()
        stuck = any(not set(nodes) & set(self.fleet.admitted) for nodes in self._waiting.values())
        if (stuck or not self.fleet.admitted) and not self._watch.is_waiting:
            reasons = "; ".join(self.fleet.left_out.values()) or "the cluster has lost its nodes"
            self._trials.halted = self._trials.halted or f"no node is left to train on: {reasons}"
        return bool(self.fleet.admitted)

    def started(self, spec: TrialSpec) -> None:
        self._waiting.pop(spec.proposal.key, None)
        self._began_s[spec.proposal.key] = time.monotonic()

    def is_on(self, spec: TrialSpec, node_id: str) -> None:
        self._node[spec.proposal.key] = node_id

    def ended(self, spec: TrialSpec, event: TrialEvent) -> bool:
        """A trial has ended; whether it is to be tried on another node."""
        failed = event.status == "failed" and event.elsewhere
        node_id = self._left(spec, failed=failed, reason=event.reason or "")
        return failed and node_id is not None and self.fleet.may_try_again(spec.proposal.key, node_id)

    def lost(self, spec: TrialSpec, reason: str) -> None:
        self._left(spec, failed=True, reason=reason)

    def seconds(self, spec: TrialSpec) -> float:
        """Since a trial was started."""
        return time.monotonic() - self._began_s.get(spec.proposal.key, math.inf)

    def _left(self, spec: TrialSpec, *, failed: bool, reason: str) -> str | None:
        self._waiting.pop(spec.proposal.key, None)
        node_id = self._node.pop(spec.proposal.key, None)
        if node_id is not None:
            line = self.fleet.ended(node_id, failed=failed, seconds=self.seconds(spec), reason=reason)
            if line is not None:
                self._log(line)
        return node_id


def _requested(config: dict[str, Any]) -> tune.PlacementGroupFactory:
    """The resources that a trial takes of a node, and the nodes it may be on."""
    selector = {ON_ONE_OF: f"in({','.join(config['nodes'])})"} if config["nodes"] else {}
    return tune.PlacementGroupFactory([config["bundle"]], bundle_label_selector=[selector])


def _trainable(config: dict[str, Any]) -> None:
    """One trial in a worker process; every event goes back through Tune."""
    tune.report({"node": ray.get_runtime_context().get_node_id()})
    for event in run_trial(config["spec"]):
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
        if not self._places.are_known():
            return None
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
            self._places.lost(spec, reason)
            self._trials.lost(spec, reason)

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        self._places.are_known()
        self._on_change()

    def _happened(self, spec: TrialSpec, event: TrialEvent) -> None:
        again = event.event == "finished" and self._places.ended(spec, event)
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
