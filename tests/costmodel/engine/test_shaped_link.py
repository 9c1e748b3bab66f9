"""The rate-limited link carries no more than it should, and leaves nothing behind."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from costmodel import ops
from costmodel.engine import shaped_link
from costmodel.engine.links import Condition
from costmodel.engine.spu import ops_job, passes
from costmodel.protocols import semi2k
from costmodel.protocols.primitives import EngineSetting

needs_link = pytest.mark.skipif(shaped_link.why_not() is not None, reason=str(shaped_link.why_not()))
RATE = 20e6  # bits a second
SENT = 1_000_000  # bytes, 0.4 s
RECEIVER = """
import socket
server = socket.create_server(("10.0.1.2", 7000))
print("ready", flush=True)
connection, _ = server.accept()
received = 0
while chunk := connection.recv(1 << 16):
    received += len(chunk)
connection.sendall(str(received).encode())
"""
SENDER = f"""
import socket
connection = socket.create_connection(("10.0.1.2", 7000))
connection.sendall(bytes({SENT}))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(100) == b"{SENT}"
"""


@needs_link
def test_plain_bytes_take_as_long_as_the_rate_says() -> None:
    with shaped_link.shaped(2) as wiring:
        wiring.set_condition(Condition(bandwidth_bits_per_s=RATE))
        command = [*wiring.prefixes[1], sys.executable, "-c", RECEIVER]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == b"ready\n"
            start = time.monotonic()
            subprocess.run([*wiring.prefixes[0], sys.executable, "-c", SENDER], check=True)
            seconds = time.monotonic() - start
    assert seconds >= (SENT - shaped_link.BURST_BYTES) * 8 / RATE


@needs_link
def test_namespaces_end_with_the_link() -> None:
    with shaped_link.shaped(3) as wiring:
        namespaces = [Path(prefix[-1].removeprefix("--net=")) for prefix in wiring.prefixes]
        assert len({namespace.readlink() for namespace in namespaces}) == 3
    assert not any(namespace.exists() for namespace in namespaces)


@needs_link
@pytest.mark.needs_engine
def test_a_run_takes_as_long_as_what_it_sends_and_waits_for() -> None:
    op = ops.Relu(rows=64, features=64)
    job = ops_job([op], protocol="semi2k", setting=EngineSetting())
    (limited,), _ = passes(job, shaped_link.shaped, [Condition(bandwidth_bits_per_s=5e6, delay_s=0.02)])
    comm = semi2k.comm(op, EngineSetting())
    assert limited.by_op[0].sent_bytes == comm.online_bytes
    # half of all bytes, since both parties send at once; the bucket fills up again in every round
    followed = comm.online_bytes / 2 - comm.rounds * shaped_link.BURST_BYTES
    assert limited.seconds >= followed * 8 / 5e6 + comm.rounds * 0.02


def test_where_it_is_not_possible_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaped_link, "PROGRAMS", ("ip", "no-such-program"))
    with pytest.raises(ValueError, match="needs Linux's ip, no-such-program, but no-such-program cannot be found"):
        shaped_link.shaped(2).__enter__()


def test_without_root_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shaped_link, "PROGRAMS", ())
    refused = subprocess.CompletedProcess([], 1, "", "unshare: unshare failed: Operation not permitted\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **settings: refused)
    assert shaped_link.why_not() == (
        "a rate-limited link needs root, to make network namespaces: unshare: unshare failed: Operation not permitted"
    )
