"""Parties that die, hang or find their port taken: one error, and nothing left running."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Timer

import pytest

from costmodel import ops
from costmodel.engine import links, session, spu
from costmodel.engine.children import started_child
from costmodel.engine.job import Job, ops_job
from costmodel.engine.links import LOOPBACK, UNHINDERED, Condition, Wiring
from costmodel.protocols.primitives import EngineSetting

SLOW = Condition(delay_s=2.0)  # a comparison takes eight times as long


def relu() -> Job:
    return ops_job([ops.Relu(rows=2, features=2)], protocol="semi2k", setting=EngineSetting())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes of the parties, in the order of their ranks."""
    found: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def record(command, **settings):
        process = popen(command, **settings)
        if "costmodel.engine.party" in command:
            found.append(process)
        return process

    monkeypatch.setattr(subprocess, "Popen", record)
    return found


@contextmanager
def delayed_and(action, num_parties: int) -> Iterator[Wiring]:
    """A delayed link that, once the parties run, does something to them."""
    with links.delayed(num_parties) as wiring:

        def set_condition(condition: Condition) -> None:
            wiring.set_condition(condition)
            Timer(0.3, action).start()

        yield replace(wiring, set_condition=set_condition)


@pytest.mark.needs_engine
@pytest.mark.parametrize("rank", [0, 1])
def test_a_party_killed_in_mid_op_ends_the_others(rank: int, started: list[subprocess.Popen[bytes]]) -> None:
    def link(num_parties: int):
        return delayed_and(lambda: os.kill(started[rank].pid, signal.SIGKILL), num_parties)

    with pytest.raises(spu.EngineError, match=rf"failed \(status -9\) in op '0.Relu' at rank {rank}: no output"):
        spu.passes(relu(), link, [SLOW], timeout_s=100)
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


@pytest.mark.needs_engine
def test_a_party_that_stops_is_not_waited_for_longer_than_asked(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(num_parties: int):
        return delayed_and(lambda: os.kill(started[1].pid, signal.SIGSTOP), num_parties)

    tell = session._tell

    def tell_with_little_time(running, children, command, *arguments):
        """Starting up is not what is timed here."""
        left = replace(running, deadline=time.monotonic() + 1.0) if command == "run" else running
        return tell(left, children, command, *arguments)

    monkeypatch.setattr(session, "_tell", tell_with_little_time)
    with pytest.raises(spu.EngineError, match=r"did not finish op '0.Relu' at rank 0 in 100 s"):
        spu.passes(relu(), link, [SLOW], timeout_s=100)
    assert all(process.poll() is not None for process in started)


@pytest.mark.needs_engine
def test_a_port_that_is_taken_is_tried_again_elsewhere(started: list[subprocess.Popen[bytes]]) -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:

        @contextmanager
        def link(num_parties: int) -> Iterator[Wiring]:
            with links.tcp(num_parties) as wiring:
                own, _ = wiring.addresses[0]
                crowded = ((own, f"{LOOPBACK}:{taken.getsockname()[1]}"),) * 2
                yield wiring if started else replace(wiring, addresses=crowded)

        (only,), _ = spu.passes(relu(), link, [UNHINDERED], timeout_s=100)
    assert only.by_op[0].messages == 16
    assert len(started) == 4


def test_what_cannot_be_started_leaves_nothing_open(tmp_path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError), started_child("none", tmp_path, (0,), 1, prefix=["/absent"]):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.needs_engine
def test_parties_end_with_their_parent(tmp_path) -> None:
    """Even with one that is killed: its end of their stdin closes."""
    read_end, write_end = os.pipe()
    (tmp_path / "job.pickle").write_bytes(pickle.dumps(relu()))
    command = [sys.executable, "-m", "costmodel.engine.party", str(tmp_path), str(write_end), "0"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[write_end])
    os.close(write_end)
    assert process.stdin is not None
    process.stdin.close()
    assert os.read(read_end, 1) == b""
    os.close(read_end)
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delay_s": -1.0}, "`delay_s` must be finite and not negative, but got -1.0."),
        ({"bandwidth_bits_per_s": 0.0}, "`bandwidth_bits_per_s` must be positive and finite, but got 0.0."),
    ],
)
def test_conditions_that_no_link_has_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Condition(**settings)


def test_links_that_only_carry_refuse_conditions() -> None:
    with links.memory(2) as wiring, pytest.raises(ValueError, match="this link neither delays nor limits messages"):
        wiring.set_condition(SLOW)
