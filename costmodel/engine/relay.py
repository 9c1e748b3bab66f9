"""A TCP relay that holds everything it carries for a time: a link of known one-way delay, without any privilege.

With a handshake at one end, it is a tunnel. Its threads only wait. Chunks keep their order and wait side by side, so
the delay takes no bandwidth away. What it adds itself, a fraction of a millisecond per message, is the same at any
delay.
"""

import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import TypeAlias

from costmodel.engine.channel import callers
from costmodel.engine.keys import Sealed
from costmodel.errors import UserError

End: TypeAlias = socket.socket | Sealed
Handshake: TypeAlias = Callable[[socket.socket], End]

CHUNK_BYTES = 1 << 16  # what one read takes at most; any size works
MOST_WAITING = 64  # connections whose handshake goes on; parties have a few each


def plain(connection: socket.socket) -> End:
    """Return a connection as it is."""
    return connection


class Relay:
    """A relay of connections. delay_s: delay, in both directions, of bytes that are read from now on."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self._servers: list[socket.socket] = []

    def forward(self, host: str, target: str, *, port: int = 0, near: Handshake = plain, far: Handshake = plain) -> str:
        """Return the address, on a port of `host` (free, by default), that now leads to the address `target`.

        near, far: turn the accepted socket, and the socket to the target, into the two ends of a connection.
        """
        server = socket.create_server((host, port))
        self._servers.append(server)
        Thread(target=self._serve, args=(server, target, near, far), daemon=True).start()
        return f"{host}:{server.getsockname()[1]}"

    def close(self) -> None:
        """Accept no more connections; existing ones stay until one of their ends closes them."""
        while self._servers:
            with self._servers.pop() as server:
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts

    def _serve(self, server: socket.socket, target: str, near: Handshake, far: Handshake) -> None:
        waiting = deque[socket.socket]()
        for accepted in callers(server, waiting, MOST_WAITING, lambda: server in self._servers):
            Thread(target=self._connect, args=(accepted, waiting, target, near, far), daemon=True).start()

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
                self._join(here, there)

    def _join(self, near: End, far: End) -> None:
        with near, far:
            back = Thread(target=self._carry, args=(far, near), daemon=True)
            back.start()
            self._carry(near, far)
            back.join()

    def _carry(self, reader: End, writer: End) -> None:
        """One direction: every chunk is written `delay_s` after it was read."""
        writer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        held: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        release = Thread(target=_release, args=(held, writer), daemon=True)
        release.start()
        with suppress(OSError):  # a party that ended
            while chunk := reader.recv(CHUNK_BYTES):
                held.put((time.monotonic() + self.delay_s, chunk))
        held.put((time.monotonic() + self.delay_s, b""))
        release.join()


def _release(held: SimpleQueue[tuple[float, bytes]], writer: End) -> None:
    with suppress(OSError):  # nobody reads any more
        while True:
            due, chunk = held.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not chunk:
                writer.shutdown(socket.SHUT_WR)
                return
            writer.sendall(chunk)
