import threading

import pytest

from nas.training.batches import AHEAD, Prefetched


def test_every_step_comes_once_in_order_and_is_begun_early():
    made, begun = [], threading.Event()

    def make(step):
        made.append((step, threading.current_thread() is threading.main_thread()))
        if step == AHEAD:
            begun.set()
        return step * 10

    batches = Prefetched(make)
    assert batches(0) == 0
    assert begun.wait(timeout=30)  # though nobody has asked for it
    assert [batches(step) for step in range(1, 6)] == [10, 20, 30, 40, 50]
    batches.close()
    assert [step for step, _ in made][:6] == list(range(6))
    assert not any(in_main for _, in_main in made)


def test_an_error_is_raised_where_its_step_is_asked_for():
    def make(step):
        if step == 1:
            raise OSError("gone")
        return step

    batches = Prefetched(make)
    assert batches(0) == 0
    with pytest.raises(OSError, match="gone"):
        batches(1)
    assert batches(2) == 2
    batches.close()
