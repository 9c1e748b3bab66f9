import pytest

from nas.run.config import StudyConfig
from nas.study.resources import Node, resolved, resource_lines, study_resources

CLUSTER = "127.0.0.1:6379"


def nodes(*shapes):
    """From (cores, GPUs) of each."""
    return [
        Node(node_id=str(number), name=f"n{number}", num_cpus=cpus, num_gpus=gpus)
        for number, (cpus, gpus) in enumerate(shapes)
    ]


def resources(*shapes, **settings):
    return study_resources(StudyConfig(budget_latency="5min", **settings), nodes(*shapes))


@pytest.mark.parametrize(("asked", "expected"), [(None, 16), (1, 1), (3, 3), (16, 16)])
def test_a_trial_takes_a_core_and_one_thread_however_many_run(asked, expected):
    capacity = resources((16, 0), max_concurrent=asked)
    assert (capacity.max_concurrent, capacity.gpus_per_trial) == (expected, 0.0)


@pytest.mark.parametrize(
    ("gpus", "share", "expected"), [(1, None, 1), (4, None, 4), (1, 0.5, 2), (2, 0.6, 2), (1, 0.3, 3), (1, 0.1, 10)]
)
def test_gpus_are_used_one_a_trial_unless_it_is_said_and_never_in_parts_of_two(gpus, share, expected):
    assert resources((16, gpus), gpus_per_trial=share).max_concurrent == expected


def test_gpus_can_be_left_alone():
    capacity = resources((16, 4), gpus_per_trial=0.0)
    assert (capacity.max_concurrent, capacity.num_gpus, capacity.gpus_per_trial) == (16, 0, 0.0)


def test_a_cluster_is_filled_whatever_this_machine_has():
    capacity = resources((8, 8), (8, 8), (0, 0), (96, 8), ray_address=CLUSTER)
    assert (capacity.slots, capacity.max_concurrent, capacity.gpus_per_trial) == (24, None, 1.0)
    assert resources((8, 0), (4, 0), ray_address=CLUSTER).slots == 12
    assert resources((8, 0), (4, 0), ray_address=CLUSTER, max_concurrent=50).max_concurrent == 50  # more may come


@pytest.mark.parametrize(
    ("shapes", "settings", "message"),
    [
        ([(4, 0)], {"gpus_per_trial": 1.0}, "--gpus-per-trial 1 needs a CUDA device, but there is none"),
        (
            [(4, 0)],
            {"max_concurrent": 5},
            "--max-concurrent must be at most 4, as a trial takes a core of this machine",
        ),
        ([(4, 2)], {"max_concurrent": 3}, "must be at most 2, as a trial takes a core and 1 GPUs of this machine"),
        ([(0, 2), (4, 0)], {"ray_address": CLUSTER}, "no node of the cluster at 127.0.0.1:6379 has both"),
    ],
)
def test_what_does_not_fit_is_refused(shapes, settings, message):
    with pytest.raises(ValueError, match=message):
        resources(*shapes, **settings)


@pytest.mark.parametrize(
    ("slots", "num_trials", "size"), [(2, 13, 2), (4, 13, 2), (8, 100, 4), (64, 1000, 32), (64, 40, 10)]
)
def test_two_generations_fill_a_cluster_but_leave_something_to_learn(slots, num_trials, size):
    config = StudyConfig(budget_latency="5min", num_trials=num_trials, ray_address=CLUSTER)
    assert resolved(config, study_resources(config, nodes((slots, 0)))).generation_size == size


def test_how_many_run_at_a_time_changes_no_generation():
    for asked in (1, 64):
        config = StudyConfig(budget_latency="5min", num_trials=1000, max_concurrent=asked)
        assert resolved(config, study_resources(config, nodes((64, 0)))).generation_size == 32


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
