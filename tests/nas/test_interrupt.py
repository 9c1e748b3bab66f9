import os
import signal

import pytest

from nas.interrupt import deferred_interrupt


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_ctrl_c_is_noted_and_the_second_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupt() as interrupted:
        assert not interrupted()
        press()
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            press()
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_is_as_ever_afterwards():
    with deferred_interrupt() as interrupted:
        pass
    assert not interrupted()
    with pytest.raises(KeyboardInterrupt):
        press()
