"""Two nodes on this machine: workers, a node and the driver are killed, and nothing is lost or trained twice."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray import tune
from ray._private import ray_constants
from ray.cluster_utils import Cluster

from nas.run import ledger
from nas.run.folder import CONFIG_FILE, read_config
from nas.study import ray_tune
from nas.study.ray_tune import run_trials
from nas.study.resources import Resources
from nas.study.trials import Trials
from nas.training.outcome import Outcome
from tests.conftest import write_email
from tests.nas.study.conftest import ONE_TRIAL

NUM_TRIALS = 4
NUM_KILLS = 20
OUTCOME = Outcome(status="completed", steps=1, tokens=8, seconds=1.0, val_loss=3.0, perplexity=20.0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without cores, and two nodes of one core, of which the last test here takes one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)  # a run on this machine alone leaves it off
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 100_000_000})
        for _ in range(2):
            made.add_node(num_cpus=1, object_store_memory=100_000_000)
        yield made
        made.shutdown()


@pytest.fixture
def trials(make_trials, corpus, tmp_path) -> Trials:
    (tmp_path / CONFIG_FILE).write_text("seed: 0\n")
    return make_trials(tmp_path, corpus, replace(ONE_TRIAL, num_trials=NUM_TRIALS, tokens=None))


def dying(config):
    """Its first worker dies, on the second trial with its node; a file in the trial's folder says how often it ran."""
    trial = config["trial"]
    trial.folder.mkdir(parents=True, exist_ok=True)
    runs = len(list(trial.folder.iterdir()))
    (trial.folder / f"run-{runs}").write_text("")
    if runs == 0 and trial.record.index == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if runs == 0 and trial.record.index == 1:
        (trial.folder.parent / "take-the-node").write_text(ray.get_runtime_context().get_node_id())
        time.sleep(60)
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


def test_a_trial_is_tried_on_another_node_where_one_does_not_see_the_run(cluster, trials, monkeypatch):
    monkeypatch.setattr(ray_tune, "_trainable", blind)
    run_trials(trials, Resources(slots=2, max_concurrent=None, ray_address=cluster.address))
    ends = [record for record in trials.records if record.event == "finished"]
    assert {end.index: end.status for end in ends} == dict.fromkeys(range(NUM_TRIALS), "completed")
    assert {end.reason for end in ends if end.status == "failed"} == {"no run folder"}


def test_where_no_node_sees_the_run_a_trial_fails_with_the_reason(cluster, trials):
    (trials.setting.folder / CONFIG_FILE).unlink()
    run_trials(trials, Resources(slots=2, max_concurrent=None, ray_address=cluster.address))
    reasons = {record.reason for record in trials.records if record.status == "failed"}
    assert all(re.fullmatch(r"the run folder .* is not on .*; all nodes must share it", reason) for reason in reasons)
    assert len(reasons) == 1


def test_a_worker_and_a_node_that_are_killed_cost_no_trial(cluster, trials, monkeypatch):
    monkeypatch.setattr(ray_tune, "_trainable", dying)
    sign = trials.setting.folder / "trials" / "take-the-node"

    def take_the_node() -> None:
        while not (sign.exists() and sign.read_text()):
            time.sleep(0.05)
        (node,) = (node for node in cluster.worker_nodes if node.node_id == sign.read_text())
        cluster.remove_node(node, allow_graceful=False)

    taker = threading.Thread(target=take_the_node)
    taker.start()
    run_trials(trials, Resources(slots=2, max_concurrent=None, ray_address=cluster.address))
    taker.join()
    ends = [record for record in trials.records if record.event == "finished"]
    assert sorted((end.index, end.status) for end in ends) == [(index, "completed") for index in range(NUM_TRIALS)]
    runs = {end.index: len(list((sign.parent / end.trial_id).iterdir())) for end in ends}
    assert runs == {0: 2, 1: 2, 2: 1, 3: 1}


def search(root: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "nas.search", *args]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_change_nothing(cluster, tmp_path):
    """`kill -9` of workers, nodes and the driver in turn, at random times, against a run that is only extended."""
    cluster.add_node(num_cpus=1, object_store_memory=100_000_000)  # in the place of one that was taken
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    data = write_email(tmp_path / "corpus")
    given = ["--budget-latency", "6.22s", "--space", "tiny", "--scale", "smoke", "--seq-len", "32", "--seed", "3"]
    given += ["--finalist-seeds", "1", "--data", str(data)]
    folder, steps = tmp_path / "killed", [8]
    command = search(tmp_path, *given, "--num-trials", str(steps[-1]), "--output-dir", str(folder))
    kills, rng = Counter[str](), random.Random(0)
    while True:
        driver = subprocess.Popen(
            [*command, "--ray-address", cluster.address], env=env, cwd=tmp_path, stdout=subprocess.DEVNULL
        )
        while driver.poll() is None:
            time.sleep(rng.uniform(1.0, 8.0))
            if kills.total() < NUM_KILLS and (workers := workers_of(cluster)) and driver.poll() is None:
                kills[kill(rng, cluster, driver, workers)] += 1
        if driver.returncode == 0 and kills.total() >= NUM_KILLS:
            break
        if driver.returncode == 0:
            steps.append(steps[-1] + 4)
        command = search(tmp_path, "--resume", str(folder), "--num-trials", str(steps[-1]))
    assert min(kills[kind] for kind in ("worker", "node", "driver")) > 0
    whole = tmp_path / "whole"
    for step, num_trials in enumerate(steps):
        args = ["--resume", str(whole)] if step else [*given, "--output-dir", str(whole)]
        command = search(tmp_path, *args, "--num-trials", str(num_trials))
        subprocess.run(command, env=env, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    assert read_config(folder).generation_size == read_config(whole).generation_size
    records = ledger.read(folder / ledger.FILE_NAME)
    ends = Counter((record.index, record.seed) for record in records if record.event == "finished")
    assert set(ends.values()) == {1}
    results, expected = (candidates(run_folder) for run_folder in (folder, whole))
    assert results == expected


def candidates(folder: Path) -> list[tuple[object, ...]]:
    """But for replicates: of a run that is extended they include those of former fronts."""
    ended = ledger.finished(ledger.read(folder / ledger.FILE_NAME))
    return [(end.trial_id, end.status, end.val_loss, end.latency_s) for end in ended if end.role == "candidate"]


def workers_of(cluster: Cluster) -> list[int]:
    """Processes of its nodes in which trials run."""
    raylets = {node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()}
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in raylets and b"ImplicitFunc" in (path / "cmdline").read_bytes():
                pids.append(int(path.name))
        except OSError:  # it has just ended
            continue
    return pids


def kill(rng: random.Random, cluster: Cluster, driver: subprocess.Popen[bytes], workers: list[int]) -> str:
    """What was killed. A node that goes is followed by another."""
    choice = rng.choice(["worker", "node", "driver"])
    if choice == "worker":
        with suppress(ProcessLookupError):
            os.kill(rng.choice(workers), signal.SIGKILL)
    elif choice == "node":
        cluster.add_node(num_cpus=1, object_store_memory=100_000_000)
        cluster.remove_node(rng.choice(sorted(cluster.worker_nodes, key=id)), allow_graceful=False)
    else:
        driver.kill()
        driver.wait()
    return choice
