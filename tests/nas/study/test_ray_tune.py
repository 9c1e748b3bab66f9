import errno
import os
import socket
import stat
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import ray
from ray import cloudpickle, tune
from ray.exceptions import OutOfMemoryError

from costmodel.errors import UserError
from nas.run import ledger
from nas.run.config import StudyConfig
from nas.study import ray_cluster, ray_tune
from nas.study.ray_cluster import cluster_nodes, ray_session
from nas.study.ray_tune import run_trials
from nas.study.resources import Node, Resources, resolved, resource_lines, study_resources
from nas.study.run_study import require_home
from nas.study.trials import RunHaltedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers then import neither this module nor torch
RESOURCES = Resources(slots=1, max_concurrent=1)


@pytest.fixture
def trials(make_trials, corpus, tmp_path):
    return make_trials(tmp_path, corpus)


def test_a_cluster_that_nobody_answers_for_or_that_is_another_is_said_before_ray_is_asked(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    unreachable = ray_session(Resources(slots=1, max_concurrent=1, ray_address=address), {})
    with pytest.raises(RunHaltedError, match=f"Ray cannot be reached at {address}: nobody answers"), unreachable:
        pass
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(RunHaltedError, match="connected to Ray already and cannot go to 127.0.0.1:1"):
        cluster_nodes("127.0.0.1:1")


@pytest.mark.parametrize(("num_slow", "fails"), [(2, False), (ray_cluster.STARTS, True)])
def test_ray_is_started_again_if_its_processes_are_slow(monkeypatch, caplog, num_slow, fails):
    caplog.set_level("INFO", "nas")
    started = []

    def init(**options):
        started.append(options)
        if len(started) <= num_slow:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    slow = pytest.raises(RunHaltedError, match="on this machine: Exception: The current node timed out")
    with slow if fails else nullcontext(), ray_session(RESOURCES, {}):
        pass
    assert len(started) == (num_slow if fails else num_slow + 1)
    assert sum("waiting for Ray" in line for line in caplog.messages) == len(started) - 1


@pytest.fixture(scope="module")
def session():
    """A session of Ray's for several studies, which each of them uses and leaves as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
        with ray_session(RESOURCES, {"NAS_TEST": "1"}):
            yield
            assert ray.is_initialized()
        assert not ray.is_initialized()


def test_a_study_on_this_machine_stays_on_loopback_whatever_ray_address_says(session):
    """The switch is Ray's own and not public: this fails if a release renames it."""
    assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
    assert ray.cluster_resources()["CPU"] == 1


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


def test_the_reason_of_a_halt_is_told_even_if_rays_files_cannot_be_removed(trials, monkeypatch, tmp_path):
    class Tuner:
        def __init__(self, *args, **settings):
            pass

        def fit(self):
            monkeypatch.setattr(os, "rmdir", busy)
            raise RuntimeError from OutOfMemoryError("no memory")

    def busy(*args, **options):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", "study")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tune, "Tuner", Tuner)
    monkeypatch.setattr(ray_tune, "ray_session", lambda *args: nullcontext())
    with pytest.raises(RunHaltedError, match="this machine ran out of memory .no memory.; train fewer at a time"):
        run_trials(trials, RESOURCES)


@pytest.mark.parametrize("temporary", ["/tmp", "/tmp/" + "long/" * 20, "/tmp/ö"])
def test_ray_gets_a_folder_of_its_own_whose_path_is_short_and_ascii(temporary):
    own = Path(ray_cluster._own_folder(temporary))
    assert str(own).startswith("/tmp/nas-")
    own.parent.rmdir()


def test_a_trial_has_the_priority_of_the_command(session):
    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)


def test_nobody_else_can_read_or_write_the_files_of_ray(session):
    folders = [files.parents[1] for files in Path("/tmp").glob(f"nas-*/r/session_*_{os.getpid()}")]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}


def test_the_cache_stands_in_for_a_home_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    require_home()
    assert os.environ["HOME"] == str(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    require_home()
    assert os.environ["HOME"] == str(tmp_path / "cache" / "private-inference-nas")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(UserError, match="name one .* in the environment variable XDG_CACHE_HOME"):
        require_home()


CLUSTER = "127.0.0.1:6379"


def nodes(*shapes):
    """From (cores, GPUs) of each."""
    return [Node(node_id=str(n), name=f"n{n}", num_cpus=cpus, num_gpus=gpus) for n, (cpus, gpus) in enumerate(shapes)]


def resources(*shapes, **settings):
    return study_resources(StudyConfig(budget_latency="5min", **settings), nodes(*shapes))


@pytest.mark.parametrize(
    ("gpus", "asked", "share", "expected"),
    [
        *((0, asked, None, asked or 16) for asked in (None, 1, 3, 16)),
        *((gpus, None, None, gpus) for gpus in (1, 4)),
        *((1, None, share, places) for share, places in ((0.5, 2), (0.3, 3), (0.1, 10))),
        *((gpus, None, share, places) for gpus, share, places in ((2, 0.6, 2), (4, 0.0, 16))),
    ],
)
def test_a_trial_takes_a_core_or_the_share_of_one_gpu_that_is_asked_for(gpus, asked, share, expected):
    capacity = resources((16, gpus), max_concurrent=asked, gpus_per_trial=share)
    assert capacity.max_concurrent == expected
    assert capacity.gpus_per_trial == (0.0 if not gpus else 1.0 if share is None else share)
    assert capacity.num_gpus == (gpus if share != 0 else 0)


def test_a_trial_takes_as_many_cores_as_it_has_threads():
    capacity = resources((9, 0), threads_per_trial=4)
    assert (capacity.slots, capacity.threads_per_trial) == (2, 4)
    assert resources((9, 0), (3, 0), (4, 0), threads_per_trial=4, ray_address=CLUSTER).slots == 3
    config = StudyConfig(budget_latency="5min", threads_per_trial=4)
    assert resource_lines(resolved(config, capacity), capacity)[0] == (
        "2 trials at a time, on the CPU, 4 threads each; generations of 2"
    )


def test_a_cluster_is_filled_whatever_this_machine_has():
    capacity = resources((8, 8), (8, 8), (0, 0), (96, 8), ray_address=CLUSTER)
    assert (capacity.slots, capacity.max_concurrent, capacity.gpus_per_trial) == (24, None, 1.0)
    assert resources((8, 0), (4, 0), ray_address=CLUSTER).slots == 12
    assert resources((8, 0), (4, 0), ray_address=CLUSTER, max_concurrent=50).max_concurrent == 50  # more may come


@pytest.mark.parametrize(
    ("shapes", "settings", "message"),
    [
        ([(4, 0)], {"gpus_per_trial": 1.0}, "--gpus-per-trial 1 needs a CUDA device, but there is none"),
        ([(4, 0)], {"max_concurrent": 5}, "--max-concurrent must be at most 4, as a trial takes a core of this mach"),
        ([(4, 0)], {"threads_per_trial": 8}, "takes 8 cores of a node, but no node of this machine has more than 4"),
        ([], {"ray_address": CLUSTER}, "takes a core of a node, but no node of the cluster at .* has more than 0"),
        ([(9, 0)], {"threads_per_trial": 4, "max_concurrent": 3}, "must be at most 2, as a trial takes 4 cores of"),
        ([(4, 2)], {"max_concurrent": 3}, "must be at most 2, as a trial takes a core and 1 GPUs of this machine"),
        ([(0, 2), (4, 0)], {"ray_address": CLUSTER}, "no node of the cluster at 127.0.0.1:6379 has both"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, settings, message):
    with pytest.raises(ValueError, match=message):
        resources(*shapes, **settings)


@pytest.mark.parametrize(
    ("slots", "num_trials", "settings", "size"),
    [
        (2, 13, {"ray_address": CLUSTER}, 2),
        (4, 13, {"ray_address": CLUSTER}, 2),
        (8, 100, {"ray_address": CLUSTER}, 4),
        (64, 1000, {"ray_address": CLUSTER}, 32),
        (64, 40, {"ray_address": CLUSTER}, 10),
        *((64, 1000, {"max_concurrent": asked}, 32) for asked in (1, 64)),  # how many run at a time changes nothing
    ],
)
def test_two_generations_fill_a_cluster_but_leave_something_to_learn(slots, num_trials, settings, size):
    config = StudyConfig(budget_latency="5min", num_trials=num_trials, **settings)
    assert resolved(config, study_resources(config, nodes((slots, 0)))).generation_size == size


def test_what_runs_and_what_is_idle_is_said_first():
    config = StudyConfig(budget_latency="5min", num_trials=40, ray_address=CLUSTER)
    capacity = study_resources(config, nodes((8, 8), (96, 56)))
    assert resource_lines(resolved(config, capacity), capacity) == [
        "64 trials at a time, 1 GPU each; generations of 10",
        "note: two generations of 10 leave 44 of 64 places idle; more --num-trials, or a larger --generation-size, "
        "which learns later, fills them",
    ]


@pytest.mark.parametrize("share", [2.0, 1.5, -0.5, float("nan"), float("inf")])
def test_a_trial_trains_on_one_gpu(share):
    with pytest.raises(ValueError, match="--gpus-per-trial must be from 0 to 1, as a trial trains on one GPU"):
        StudyConfig(budget_latency="5min", gpus_per_trial=share)
