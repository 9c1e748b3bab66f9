"""The Ray Tune adapter: asks for trials, runs each in a worker process, and passes every event on.

Proposals, early stops and records come from `Trials` and `run_trial`; the adapter only decides whether a failed trial
is tried on another node.
"""

import math
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle, tune
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError
from ray.tune.error import TuneError
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.search import Searcher

from costmodel.config.bugs import described, traceback_kept
from nas.run.ledger import Record, TrialKey
from nas.study.ray_cluster import alive_nodes, ray_session
from nas.study.resources import Resources
from nas.study.time_budget import TimeBudget
from nas.study.trials import RunHaltedError, Trial, Trials, over_timeout
from nas.study.worker import out_of_reach, run_trial, worker_env

DEAD_WORKER = (RayActorError, WorkerCrashedError, OutOfMemoryError)
ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
NODE_LABEL = "ray.io/node-id"  # a label that Ray gives every node
MOST_NODES = 3  # a trial that has failed on so many nodes is not tried on another


def run_trials(
    trials: Trials,
    resources: Resources,
    *,
    budget: TimeBudget | None = None,
    on_change: Callable[[], None] = lambda: None,
) -> None:
    """Run trials until the schedule is finished or the time is up.

    budget: time budget; None for no limit. on_change: called after every step of Tune. Raises RunHaltedError if the run
    cannot continue now, but can be resumed; UserError as `Trials.next_trial` does; KeyboardInterrupt on Ctrl-C.
    """
    budget = budget or TimeBudget(None, time.monotonic())
    plan = partial(budget.plan, trials, resources.at_a_time)
    trials.has_time_for = partial(budget.has_time_for, trials)
    with (
        # removed after Ray has ended; what it still writes must not replace the error of the search
        tempfile.TemporaryDirectory(prefix="nas-tune-", ignore_cleanup_errors=True) as scratch,
        ray_session(resources, worker_env(resources.threads_per_trial)),
    ):
        budget.mark("Ray")
        recorder = _Recorder(trials, resources, budget, plan, on_change)
        tuner = tune.Tuner(
            tune.with_resources(_trainable, _requested),
            tune_config=tune.TuneConfig(
                search_alg=_Asker(trials, resources, recorder.failed_on, plan),
                num_samples=-1,
                max_concurrent_trials=resources.max_concurrent,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                name="study",
                storage_path=scratch,
                verbose=0,
                callbacks=[recorder],
                stop=_Stopper(trials, budget),
            ),
        )
        try:
            tuner.fit()
        except RuntimeError as error:
            if isinstance(error.__cause__, OutOfMemoryError):  # raised while an actor is made; Tune passes it on
                raise RunHaltedError(
                    f"this machine ran out of memory ({str(error.__cause__).splitlines()[0]}); train fewer at a time "
                    "(--max-concurrent) or end what else runs"
                ) from error
            raise
        except TuneError as error:  # Tune keeps only the text of what our callbacks raise
            if isinstance(error.__context__, Exception):
                raise error.__context__ from None
            raise
    if trials.halted:
        raise RunHaltedError(trials.halted)


def _requested(config: dict[str, Any]) -> tune.PlacementGroupFactory:
    selector = {NODE_LABEL: f"!in({','.join(config['not_on'])})"} if config["not_on"] else {}
    return tune.PlacementGroupFactory([config["bundle"]], bundle_label_selector=[selector])


def _trainable(config: dict[str, Any]) -> None:
    tune.report({"node": ray.get_runtime_context().get_node_id()})
    trial: Trial = config["trial"]
    if config["is_cluster"] and (reason := out_of_reach(trial)):
        tune.report({"record": trial.ended("failed", reason)})
        return
    try:
        for record in run_trial(trial, lambda pace: tune.report({"pace": pace})):
            tune.report({"record": record})
    except RunHaltedError as error:
        tune.report({"halted": str(error)})


class _Unpickled:
    """Pickles as an empty object: Tune pickles its parts, but ours hold live state, and only the ledger is resumed."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return object, ()


class _Asker(_Unpickled, Searcher):
    """Asks for trials. failed_on: nodes that a trial has failed on."""

    def __init__(
        self, trials: Trials, resources: Resources, failed_on: Mapping[TrialKey, set[str]], plan: Callable[[], None]
    ) -> None:
        super().__init__(metric="unused", mode="min")
        self._trials, self._failed_on, self._plan = trials, failed_on, plan
        self._bundle = {"CPU": resources.threads_per_trial, "GPU": resources.gpus_per_trial}
        self._is_cluster = resources.ray_address is not None

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial, None if there is none yet, or FINISHED if no more will come.

        The trial is returned as plain data, because Tune derives resources from a copy.
        """
        self._plan()
        if self._trials.halted:
            return Searcher.FINISHED
        trial = self._trials.next_trial()
        if trial is None:  # a running trial may be lost and asked for again
            is_last = self._trials.finished or self._trials.is_held
            return Searcher.FINISHED if is_last and not self._trials.running else None
        not_on = sorted(self._failed_on.get(trial.key, ()))
        return {"trial": trial, "bundle": self._bundle, "not_on": not_on, "is_cluster": self._is_cluster}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Does nothing: the recorder tells the schedule."""

    def save(self, checkpoint_path: str) -> None:
        """Does nothing: the ledger is the only state."""

    def restore(self, checkpoint_path: str) -> None:
        """Does nothing: the ledger is the only state."""


class _Recorder(_Unpickled, tune.Callback):
    """Passes Tune's events on to the trials and the time budget.

    On a cluster, a trial that fails is tried again on another node, until it has failed on MOST_NODES.
    """

    def __init__(
        self,
        trials: Trials,
        resources: Resources,
        budget: TimeBudget,
        plan: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        self._trials, self._budget, self._plan, self._on_change = trials, budget, plan, on_change
        self._is_cluster = resources.ray_address is not None
        self.failed_on: dict[TrialKey, set[str]] = {}
        self._waiting: set[TrialKey] = set()  # to be tried on another node, not started yet
        self._began_s: dict[TrialKey, float] = {}
        self._node: dict[TrialKey, str] = {}

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        ours = _ours(trial)
        self._waiting.discard(ours.key)
        self._began_s[ours.key] = time.monotonic()
        self._trials.started(ours)

    def on_trial_result(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any], **info: Any
    ) -> None:
        ours = _ours(trial)
        if node_id := result.get("node"):
            self._node[ours.key] = node_id
            self._budget.mark("first worker")
        if pace := result.get("pace"):
            self._budget.told(ours.key, pace)
            self._plan()
        if record := result.get("record"):
            self._happened(ours, record)
        if reason := result.get("halted"):
            self._trials.halt(reason)

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        ours, error = _ours(trial), TuneError("Ray gives no reason")
        # `Trial.get_error` looks in storage, where the error is copied only after this callback
        if trial.pickled_error_file is not None:
            error = cloudpickle.loads(Path(trial.pickled_error_file).read_bytes())
        elif trial.error_file is not None:
            error = TuneError(Path(trial.error_file).read_text(encoding="utf-8", errors="replace"))
        reason, timeout_s = loss_reason(error, ours.folder), ours.setting.config.trial_timeout_s
        if not isinstance(error, DEAD_WORKER):
            self._happened(ours, ours.ended("failed", reason))
        elif timeout_s is not None and time.monotonic() - self._began_s.get(ours.key, math.inf) >= timeout_s:
            self._happened(ours, ours.ended("failed", over_timeout(timeout_s)))
        else:
            self._trials.lost(ours, reason)

    def on_step_end(self, iteration: int, trials: list[TuneTrial], **info: Any) -> None:
        if any({node.node_id for node in alive_nodes()} <= self.failed_on[key] for key in self._waiting):
            self._trials.halt("no node is left to train on: a trial has failed on all that are there")
        self._on_change()

    def _happened(self, trial: Trial, record: Record) -> None:
        again = record.event == "finished" and self._is_tried_elsewhere(trial, record)
        self._trials.happened(record, again=again)

    def _is_tried_elsewhere(self, trial: Trial, record: Record) -> bool:
        node_id = self._node.pop(trial.key, None)
        timeout_s = trial.setting.config.trial_timeout_s
        is_late = timeout_s is not None and record.reason == over_timeout(timeout_s)
        if not (self._is_cluster and record.status == "failed" and node_id) or is_late:
            return False
        failed_on = self.failed_on.setdefault(trial.key, set())
        failed_on.add(node_id)
        if len(failed_on) >= MOST_NODES or {node.node_id for node in alive_nodes()} <= failed_on:
            return False
        self._waiting.add(trial.key)
        return True


class _Stopper(_Unpickled, tune.Stopper):
    def __init__(self, trials: Trials, budget: TimeBudget) -> None:
        self._trials, self._budget = trials, budget

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return bool(self._trials.halted) or self._budget.is_over(self._trials)


def loss_reason(error: Exception, folder: Path) -> str:
    """Return why a trial ended without a record, from Ray's error; the traceback of a bug is written into `folder`."""
    if isinstance(error, DEAD_WORKER):
        return "the worker process died (out of memory?)"
    cause = error.cause if isinstance(error, RayTaskError) else error
    text = ANSI_COLOURS.sub("", str(error))  # Ray's text, which has the worker's traceback
    return f"bug: {described(cause)}; {traceback_kept(text, folder)}"


def _ours(trial: TuneTrial) -> Trial:
    ours = trial.config["trial"]
    assert isinstance(ours, Trial)
    return ours
