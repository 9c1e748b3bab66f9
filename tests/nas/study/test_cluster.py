import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import ray
from ray import cloudpickle, tune
from ray._private import ray_constants
from ray.cluster_utils import Cluster

from nas.run.folder import CONFIG_FILE
from nas.study import ray_tune
from nas.study.ray_tune import run_trials
from nas.study.resources import Resources
from nas.study.trials import Trials
from nas.training.outcome import Outcome
from tests.nas.study.conftest import ONE_TRIAL

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers then import neither this module nor torch
OUTCOME = Outcome(status="completed", steps=1, tokens=8, seconds=1.0, val_loss=3.0, perplexity=20.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and a node, of one core each; the last test here takes the node, which the head misses in a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)  # a run on this machine alone leaves it off
        sizes: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100_000_000}
        spared = {"no_monitor": True, "include_log_monitor": False}  # processes that no study asks for anything
        of_head = {"_system_config": {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200}}
        made = Cluster(initialize_head=True, head_node_args={**sizes, **spared, **of_head})
        made.add_node(**sizes)
        yield made
        made.shutdown()


@pytest.fixture
def trials(make_trials, corpus, tmp_path, request) -> Trials:  # two, or as many as a test asks for
    (tmp_path / CONFIG_FILE).write_text("seed: 0\n")
    return make_trials(tmp_path, corpus, replace(ONE_TRIAL, num_trials=getattr(request, "param", 2), tokens=None))


def dying(config):
    """Its first worker on the head dies, and the other node; a file in the trial's folder says how often it ran."""
    trial, node_id = config["trial"], ray.get_runtime_context().get_node_id()
    trial.folder.mkdir(parents=True, exist_ok=True)
    runs = len(list(trial.folder.iterdir()))
    (trial.folder / f"run-{runs}").write_text("")
    if runs == 0 and trial.record.index < 2:
        (trial.setting.folder / node_id).write_text("")
        if node_id != (trial.setting.folder / "head").read_text():
            time.sleep(600)
        while len(list(trial.folder.parent.iterdir())) < 2:  # the other trial is then on the node
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    tune.report({"record": trial.ended("completed", measured=OUTCOME)})


def blind(config):
    """The first node to take a trial does not see the run; all others complete theirs."""
    trial, node_id = config["trial"], ray.get_runtime_context().get_node_id()
    tune.report({"node": node_id})
    with suppress(FileExistsError), (trial.setting.folder / "blind").open("x") as file:
        file.write(node_id)
    if (trial.setting.folder / "blind").read_text() in ("", node_id):
        tune.report({"record": trial.ended("failed", "no run folder")})
        return
    tune.report({"record": trial.ended("completed", measured=OUTCOME)})


@pytest.mark.slow
def test_a_trial_is_tried_on_another_node_where_one_does_not_see_the_run(cluster, trials, monkeypatch):
    monkeypatch.setattr(ray_tune, "_trainable", blind)
    run_trials(trials, Resources(slots=2, max_concurrent=None, ray_address=cluster.address))
    ends = [record for record in trials.records if record.event == "finished"]
    assert {end.index: end.status for end in ends} == {0: "completed", 1: "completed"}
    assert {end.reason for end in ends if end.status == "failed"} == {"no run folder"}


@pytest.mark.parametrize("trials", [1], indirect=True)
def test_where_no_node_sees_the_run_a_trial_fails_with_the_reason(cluster, trials):
    (trials.setting.folder / CONFIG_FILE).unlink()
    run_trials(trials, Resources(slots=2, max_concurrent=None, ray_address=cluster.address))
    reasons = {record.reason for record in trials.records if record.status == "failed"}
    assert all(re.fullmatch(r"the run folder .* is not on .*; all nodes must share it", reason) for reason in reasons)
    assert len(reasons) == 1


@pytest.mark.parametrize("trials", [3], indirect=True)
def test_a_worker_and_a_node_that_are_killed_cost_no_trial(cluster, trials, monkeypatch):
    monkeypatch.setattr(ray_tune, "_trainable", dying)
    (trials.setting.folder / "head").write_text(cluster.head_node.node_id)
    (node,) = cluster.worker_nodes

    def take_the_node() -> None:
        while not (trials.setting.folder / node.node_id).exists():
            time.sleep(0.05)
        cluster.remove_node(node, allow_graceful=False)

    taker = threading.Thread(target=take_the_node)
    taker.start()
    run_trials(trials, Resources(slots=2, max_concurrent=None, ray_address=cluster.address))
    taker.join()
    ends = [record for record in trials.records if record.event == "finished"]
    assert sorted((end.index, end.status) for end in ends) == [(index, "completed") for index in range(3)]
    runs = {end.index: len(list((trials.setting.folder / "trials" / end.trial_id).iterdir())) for end in ends}
    assert runs == {0: 2, 1: 2, 2: 1}
