import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from costmodel.engine.links import LOOPBACK, MOST_WAITING, Relay, free_addresses

DELAY_S = 0.05


@pytest.fixture
def echo() -> Iterator[str]:
    """The address of a server that sends back what it gets, connection after connection."""
    with socket.create_server((LOOPBACK, 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    while chunk := connection.recv(1 << 16):
                        connection.sendall(chunk)

        threading.Thread(target=serve, daemon=True).start()
        yield f"{LOOPBACK}:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay() -> Iterator[Relay]:
    with closing(Relay()) as started:
        yield started


def connected(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def there_and_back(connection: socket.socket, sent: bytes) -> tuple[bytes, float]:
    """What comes back, and after how many seconds."""
    start = time.monotonic()
    writer = threading.Thread(target=connection.sendall, args=(sent,))
    writer.start()
    received = bytearray()
    while len(received) < len(sent):
        received += connection.recv(1 << 16)
    writer.join()
    return bytes(received), time.monotonic() - start


def test_bytes_keep_their_order_and_wait_both_ways(relay, echo):
    numbers = b"".join(number.to_bytes(4, "big") for number in range(500_000))
    with connected(relay.forward(LOOPBACK, echo)) as connection:
        assert there_and_back(connection, numbers)[0] == numbers
        relay.delay_s = DELAY_S
        received, seconds = there_and_back(connection, b"late")
        assert (received, seconds >= 2 * DELAY_S) == (b"late", True)


def test_chunks_wait_side_by_side(relay, echo):
    """Ten messages, one after the other, are ten waits; at once, they are one."""
    relay.delay_s = DELAY_S
    with connected(relay.forward(LOOPBACK, echo)) as connection:
        one_by_one = sum(there_and_back(connection, b"x")[1] for _ in range(10))
        _, at_once = there_and_back(connection, bytes(2_000_000))  # some thirty chunks and more
    assert one_by_one >= 20 * DELAY_S
    assert at_once < one_by_one


def test_a_target_that_does_not_listen_closes_the_connection(relay):
    (nobody,) = free_addresses(1)
    with connected(relay.forward(LOOPBACK, nobody)) as connection:
        assert connection.recv(1) == b""


def test_strangers_and_a_flood_leave_room_for_a_party(relay, echo, monkeypatch):
    accept = socket.socket.accept
    failed: list[OSError] = []

    def accept_or_fail(server):
        if not failed:
            failed.append(OSError(errno.EMFILE, "too many open files"))
            raise failed[0]
        return accept(server)

    def greeted(connection):
        if connection.recv(1) != b"!":
            raise OSError("a stranger")
        return connection

    monkeypatch.setattr(socket.socket, "accept", accept_or_fail)
    address = relay.forward(LOOPBACK, echo, near=greeted)
    with ExitStack() as stack:
        strangers = [stack.enter_context(connected(address)) for _ in range(MOST_WAITING + 5)]
        party = stack.enter_context(connected(address))
        party.sendall(b"!")
        assert there_and_back(party, b"text")[0] == b"text"
        assert [stranger.recv(1) for stranger in strangers[:5]] == [b""] * 5
    assert failed


def test_a_closed_relay_takes_no_connection(relay, echo):
    address = relay.forward(LOOPBACK, echo)
    relay.close()
    with pytest.raises(ConnectionRefusedError):
        connected(address)
