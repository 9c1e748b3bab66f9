from dataclasses import replace

import pytest

from nas.run.folder import CONFIG_FILE
from nas.study.nodes import (
    MOST_NODES,
    QUICK_FAILURES,
    Fleet,
    Node,
    Question,
    probe_file,
    problem,
)

KEY = (0, 0)


def fleet(*names):
    made = Fleet()
    for name in names:
        made.admit(Node(node_id=name, name=f"host-{name}", num_cpus=4, num_gpus=0))
    return made


def fail(nodes, name, times, seconds=1.0):
    return [nodes.ended(name, failed=True, seconds=seconds, reason="no corpus") for _ in range(times)]


def test_a_node_on_which_several_trials_in_a_row_fail_in_seconds_is_left_out():
    nodes = fleet("a", "b")
    lines = fail(nodes, "a", QUICK_FAILURES)
    assert lines[:-1] == [None] * (QUICK_FAILURES - 1)
    assert lines[-1] == (
        "node host-a is left out: 3 trials in a row failed on it within 30 s each, the last: no corpus"
    )
    assert nodes.nodes_for(KEY) == ("b",)
    assert fail(nodes, "b", 10) == [None] * 10  # where no other is left, the trials are to blame


def test_neither_slow_failures_nor_some_between_successes_leave_a_node_out():
    nodes = fleet("a", "b")
    assert fail(nodes, "a", 10, seconds=100.0) == [None] * 10
    for _ in range(5):
        assert fail(nodes, "a", QUICK_FAILURES - 1) == [None] * (QUICK_FAILURES - 1)
        assert nodes.ended("a", failed=False, seconds=1.0, reason="") is None


def test_a_trial_that_failed_is_tried_on_other_nodes_and_not_on_all():
    nodes = fleet("a", "b", "c", "d")
    assert nodes.may_try_again(KEY, "a")
    assert nodes.nodes_for(KEY) == ("b", "c", "d")
    assert nodes.nodes_for((1, 0)) == ("a", "b", "c", "d")
    assert [nodes.may_try_again(KEY, name) for name in "bc"] == [True, False]
    assert MOST_NODES == 3
    alone = fleet("a")
    assert not alone.may_try_again(KEY, "a")
    assert alone.nodes_for(KEY) == ("a",)  # its worker may be lost, and start again there


def test_a_node_that_is_gone_is_not_asked_for():
    nodes = fleet("a", "b")
    nodes.gone("a")
    nodes.gone("c")
    assert nodes.nodes_for(KEY) == ("b",)
    assert nodes.left_out == {}


@pytest.fixture
def asked(corpus, tmp_path):
    (tmp_path / CONFIG_FILE).write_text("seed: 0\n")
    return Question(folder=tmp_path, corpus=corpus, device="cpu")


def test_a_node_that_has_everything_leaves_a_file(asked):
    assert problem(asked, "n1") is None
    assert probe_file(asked.folder, "n1").read_text() == "n1"


def test_what_a_node_lacks_is_said(asked, tmp_path):
    assert "its copy of this package is another one" in problem(replace(asked, sources="0" * 12), "n1")
    assert problem(replace(asked, versions={"torch": "1.0"}), "n1").startswith("it has torch 2.")
    elsewhere = replace(asked, folder=tmp_path / "no")
    assert problem(elsewhere, "n1") == (
        f"run folder {tmp_path / 'no'} cannot be read and written there: No such file or directory"
    )
    gone = replace(asked, corpus=replace(asked.corpus, folder=str(tmp_path)))
    assert f"corpus {tmp_path} is not there: [Errno 2] No such file" in problem(gone, "n1")
    without_second = replace(asked, second=gone.corpus)
    assert f"corpus {tmp_path} is not there: [Errno 2] No such file" in problem(without_second, "n1")
    longer = replace(asked, corpus=replace(asked.corpus, num_train_tokens=asked.corpus.num_train_tokens * 2))
    assert f"corpus {asked.corpus.folder} is not there: mmap length is greater" in problem(longer, "n1")


def test_a_gpu_that_is_not_there_is_said(asked, monkeypatch):
    monkeypatch.setattr("torch.ones", lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("No CUDA\nGPUs")))
    assert problem(replace(asked, device="cuda"), "n1") == "its GPU does not compute: No CUDA GPUs"
