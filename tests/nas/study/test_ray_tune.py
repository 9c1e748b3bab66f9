import os
import socket

import pytest
import ray
from ray import tune

from nas.run import ledger
from nas.study import ray_cluster, ray_tune
from nas.study.ray_cluster import cluster_nodes, ray_session
from nas.study.ray_tune import run_trials
from nas.study.resources import Resources
from nas.study.trials import RunHaltedError

RESOURCES = Resources(slots=1, max_concurrent=1)


@pytest.fixture
def trials(make_trials, corpus, tmp_path):
    return make_trials(tmp_path, corpus)


def test_a_study_on_this_machine_stays_on_loopback_whatever_ray_address_says(monkeypatch):
    """The switch is Ray's own and not public: this fails if a release renames it."""
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    with ray_session(RESOURCES, {"NAS_TEST": "1"}):
        assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
        assert ray.cluster_resources()["CPU"] == 1
    assert not ray.is_initialized()


def test_an_address_where_nobody_listens_is_said_before_ray_is_asked():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    unreachable = ray_session(Resources(slots=1, max_concurrent=1, ray_address=address), {})
    with pytest.raises(RunHaltedError, match=f"Ray cannot be reached at {address}: nobody answers"), unreachable:
        pass


@pytest.fixture(scope="module")
def session():
    """A session of Ray's for several studies, which each of them uses and leaves as it is."""
    with ray_session(RESOURCES, {}):
        yield
        assert ray.is_initialized()


def mistaken(config):
    raise TypeError("no\nlength")


def killed(config):
    os._exit(3)


@pytest.mark.parametrize(
    ("trainable", "reason"),
    [
        (mistaken, "bug: TypeError: no length; the traceback is in {path}"),
        (killed, "the worker process died (out of memory?), 1 times"),
    ],
)
def test_only_a_worker_that_died_is_said_to_have(session, trials, monkeypatch, trainable, reason):
    """Ray's own names of these errors, and where it keeps them while a callback runs: this fails if they change."""
    monkeypatch.setattr(ray_tune, "_trainable", trainable)
    monkeypatch.setattr("nas.study.trials.MAX_LOSSES", 0)  # each is a worker that starts
    run_trials(trials, RESOURCES)
    (record,) = ledger.finished(trials.records)
    path = trials.setting.folder / "trials" / record.trial_id / "traceback.txt"
    assert (record.status, record.reason) == ("failed", reason.format(path=path))
    assert path.exists() == (trainable is mistaken)
    if path.exists():
        assert "raise TypeError" in path.read_text()
        assert "\x1b" not in path.read_text()


@pytest.mark.parametrize("callback", ["happened", "next_trial"])
def test_a_bug_in_this_process_keeps_its_type(session, trials, monkeypatch, callback):
    def broken(*args, **rest):
        raise TypeError("here")

    def one_result(config):
        tune.report({"record": config["trial"].ended("completed")})

    monkeypatch.setattr(ray_tune, "_trainable", one_result)
    monkeypatch.setattr(trials, callback, broken)
    with pytest.raises(TypeError, match="here"):
        run_trials(trials, RESOURCES)


def test_a_cluster_is_not_taken_for_the_one_that_this_process_is_connected_to(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(RunHaltedError, match="connected to Ray already and cannot go to 127.0.0.1:1"):
        cluster_nodes("127.0.0.1:1")


def test_ray_gets_a_short_folder_where_the_temporary_one_is_long_or_not_ascii():
    assert ray_cluster._short_folder("/tmp") is None
    for folder in ("/tmp/" + "long/" * 20, "/tmp/ö"):
        own = ray_cluster._short_folder(folder)
        assert own is not None
        assert own.startswith("/tmp/nas-")
        os.rmdir(own)
