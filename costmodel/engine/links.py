"""Links between the parties of one machine: TCP over loopback, direct or delayed; and TLS tunnels between machines.

A link is a function of a number of parties. It returns a context manager that yields a `Wiring`.
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias

from costmodel.engine.channel import Connection, Sealed, hear_callers
from costmodel.engine.keys import HANDSHAKE_S, Keys
from costmodel.errors import UserError

LOOPBACK = "127.0.0.1"
UNHINDERED = 0.0  # seconds of delay
CHUNK_BYTES = 1 << 16  # largest number of bytes in one read of a relay; any size works
MOST_WAITING = 64  # largest number of a relay's connections in a handshake; parties have a few each

Handshake: TypeAlias = Callable[[socket.socket], Connection]


def refuse_delay(delay_s: float) -> None:
    """Raise UserError for a delay other than 0 s. It is the `Wiring.set_delay` of links that cannot delay messages."""
    if delay_s != UNHINDERED:
        raise UserError(f"this link does not delay messages, but got {delay_s} s.")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Wiring:
    """The addresses of a link, and its delay.

    addresses: `addresses[a][b]` is where party a calls party b, and `addresses[a][a]` is where party a listens.
    set_delay: function that sets the one-way delay of every message, in seconds; to be called only between passes.
    """

    addresses: tuple[tuple[str, ...], ...]
    set_delay: Callable[[float], None] = refuse_delay


def plain(connection: socket.socket) -> Connection:
    """Return a connection unchanged: the handshake of a link without TLS."""
    return connection


class Relay:
    """A TCP relay that delays the bytes that it carries by a set time; this needs no privileges.

    With a TLS handshake at one end, it is a tunnel. Chunks keep their order and wait at the same time, so that a delay
    does not lower the bandwidth. The relay itself takes a fraction of a millisecond per message, at any delay.

    delay_s: one-way delay in seconds, in both directions, of bytes that are read from now on.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self._servers: list[socket.socket] = []

    def forward(self, host: str, target: str, *, port: int = 0, near: Handshake = plain, far: Handshake = plain) -> str:
        """Forward calls at `port` of `host` to the address `target`, and return the address to call instead of it.

        port: 0 for any free port. Raise OSError if the port is taken.
        near, far: handshakes, which turn the accepted socket, and the socket to the target, into connections.
        """
        server = socket.create_server((host, port))
        self._servers.append(server)
        connect = partial(self._connect, target=target, near=near, far=far)
        callers = (server, MOST_WAITING, lambda: server in self._servers, connect)
        Thread(target=hear_callers, args=callers, daemon=True).start()
        return f"{host}:{server.getsockname()[1]}"

    def close(self) -> None:
        """Stop accepting connections. Existing connections last until one of their ends closes them."""
        while self._servers:
            with self._servers.pop() as server:
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts

    def _connect(
        self, accepted: socket.socket, waiting: deque[socket.socket], target: str, near: Handshake, far: Handshake
    ) -> None:
        host, _, port = target.rpartition(":")
        # nobody listens there yet, or somebody else (the peer tries again), or this one had to leave (a ValueError)
        with suppress(OSError, UserError, ValueError), accepted, accepted.dup() as handed:
            try:
                here = near(handed)  # which a handshake may detach, while a flood may still end it
            finally:
                waiting.remove(accepted)
            with here, socket.create_connection((host, int(port))) as reached, far(reached) as there:
                back = Thread(target=self._carry, args=(there, here), daemon=True)
                back.start()
                self._carry(here, there)
                back.join()

    def _carry(self, reader: Connection, writer: Connection) -> None:
        """Carry bytes in one direction: every chunk is written `delay_s` seconds after it was read."""
        writer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        held: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        release = Thread(target=_release, args=(held, writer), daemon=True)
        release.start()
        with suppress(OSError):  # a party that ended
            while chunk := reader.recv(CHUNK_BYTES):
                held.put((time.monotonic() + self.delay_s, chunk))
        held.put((time.monotonic() + self.delay_s, b""))
        release.join()


def _release(held: SimpleQueue[tuple[float, bytes]], writer: Connection) -> None:
    with suppress(OSError):  # nobody reads any more
        while True:
            due, chunk = held.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not chunk:
                writer.shutdown(socket.SHUT_WR)
                return
            writer.sendall(chunk)


Link: TypeAlias = Callable[[int], AbstractContextManager[Wiring]]


@contextmanager
def tcp(num_parties: int) -> Iterator[Wiring]:
    """Yield a wiring that uses free ports of this machine, without delays."""
    yield Wiring(addresses=(free_addresses(num_parties),) * num_parties)


@contextmanager
def delayed(num_parties: int) -> Iterator[Wiring]:
    """Yield a wiring that uses free ports of this machine, where a relay can delay all messages in both directions."""
    addresses = free_addresses(num_parties)
    with closing(Relay()) as relay:
        # what a rank knows: its own address, and a port of the relay for every other rank
        known = [
            tuple(
                address if peer == rank else relay.forward(LOOPBACK, address) for peer, address in enumerate(addresses)
            )
            for rank in range(num_parties)
        ]
        yield Wiring(addresses=tuple(known), set_delay=partial(setattr, relay, "delay_s"))


def tunnelled(relay: Relay, addresses: Sequence[str], keys: Keys) -> tuple[str, ...]:
    """Open TLS tunnels to the engines of the other parties, and return the local addresses, by rank, to use instead.

    The local address of another rank leads to the entry of that rank in `addresses`. The local address of this party is
    a free one at which its engine must listen: the relay forwards calls at this party's entry in `addresses` to it.
    Raise OSError if the port of this entry is taken.
    """

    def called(peer: int, connection: socket.socket) -> Sealed:
        return keys.called(connection, peer, time.monotonic() + HANDSHAKE_S)

    def accepted(connection: socket.socket) -> Sealed:
        return keys.accepted(connection, time.monotonic() + HANDSHAKE_S)[0]

    (own,), (host, _, port) = free_addresses(1), addresses[keys.rank].rpartition(":")
    relay.forward(host, own, port=int(port), near=accepted)
    return tuple(
        own if peer == keys.rank else relay.forward(LOOPBACK, address, far=partial(called, peer))
        for peer, address in enumerate(addresses)
    )


def free_addresses(count: int) -> tuple[str, ...]:
    """Return `count` addresses with ports of this machine that were free a moment ago."""
    sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    addresses = tuple(f"{LOOPBACK}:{listening.getsockname()[1]}" for listening in sockets)
    for listening in sockets:
        listening.close()
    return addresses
