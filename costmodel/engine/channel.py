"""Channels between parties, besides the engine's own link: frames of a JSON header and bytes, over stream sockets.

They carry programs, shares and results, each between the two parties concerned. A channel that ends without a farewell
means that the peer is gone, which the engine itself would notice only minutes later.
"""

import json
import math
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeAlias

MAX_HEADER_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")
# A silent peer is probed after 3 s, then every 2 s, and given up after 3 unanswered probes: its machine may be gone.
KEEP_ALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
UNACKNOWLEDGED_MS = 9_000  # likewise, for data that was sent
LEAVE, FAREWELL = "leave", "farewell"  # what the client tells the others, and the last frame of every party
JOINED_BYTES = 1 << 16  # a frame of up to this size is copied into one piece and sent at once
PIECE_BYTES = 1 << 20  # memory for a blob grows from this size as its bytes come

Blob: TypeAlias = bytes | bytearray | memoryview  # of bytes


class Frame(NamedTuple):
    """A message: a header of plain data, and blobs of bytes that go with it."""

    header: dict[str, Any]
    blobs: tuple[Blob, ...] = ()


class GoneError(ConnectionError):
    """The peer has left, or sends something other than frames."""


class Channel:
    """One end of a connection. `sent_bytes` counts what was sent so far, headers included."""

    def __init__(self, connection: socket.socket) -> None:
        if connection.family != socket.AF_UNIX:  # there, the other end cannot vanish unnoticed
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in {**KEEP_ALIVE, "TCP_USER_TIMEOUT": UNACKNOWLEDGED_MS, "TCP_NODELAY": 1}.items():
                if hasattr(socket, name):  # Linux has all of them
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection, self.sent_bytes = connection, 0

    def send(self, header: dict[str, Any], blobs: Sequence[Blob] = ()) -> None:
        """Send a frame. Raise GoneError if the peer does not receive it."""
        head = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
        parts, size = [_LENGTH.pack(len(head)), head, *blobs], _LENGTH.size + len(head) + sum(map(len, blobs))
        try:
            for part in parts if size > JOINED_BYTES else [b"".join(parts)]:
                self._connection.sendall(part)
        except OSError as error:
            raise GoneError(str(error)) from None
        self.sent_bytes += size

    def receive(self, timeout_s: float | None = None, max_blob_bytes: float = math.inf) -> Frame:
        """Return the next frame. Raise GoneError if none comes in time, or its blobs exceed `max_blob_bytes`."""
        self._connection.settimeout(timeout_s)
        try:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            if length > MAX_HEADER_BYTES:
                raise GoneError("what came is no frame")
            header = json.loads(self._exactly(length))
            if sum(map(abs, sizes := header.pop("sizes"))) > max_blob_bytes:
                raise GoneError("what came is larger than it may be")
            blobs = tuple(map(self._exactly, sizes))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise GoneError(str(error)) from None
        finally:
            self._connection.settimeout(None)
        return Frame(header, blobs)

    def close(self) -> None:
        self._connection.close()

    def _exactly(self, num_bytes: int) -> bytearray:
        received, have = bytearray(), 0
        while have < num_bytes:
            received += bytes(min(num_bytes - have, max(have, PIECE_BYTES)))
            with memoryview(received) as view:
                while have < len(view):
                    if not (got := self._connection.recv_into(view[have:])):
                        raise GoneError("the connection ended")
                    have += got
        return received


class Peers:
    """The other parties, as one party sees them: channels by rank, each read by its own thread as frames come.

    So no party waits for one that is gone. `on_gone` is called at once, in that thread, with the rank of a peer that
    left without a farewell.
    """

    def __init__(self, channels: Mapping[int, Channel], on_gone: Callable[[int], None]) -> None:
        self._channels, self._on_gone = channels, on_gone
        self._frames: dict[int, SimpleQueue[Frame]] = {rank: SimpleQueue() for rank in channels}
        self._readers = [Thread(target=self._read, args=(rank,), daemon=True) for rank in channels]
        for reader in self._readers:
            reader.start()

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to all peers so far."""
        return sum(channel.sent_bytes for channel in self._channels.values())

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._channels))

    def send(self, rank: int, header: dict[str, Any], blobs: Sequence[Blob] = ()) -> None:
        """Send a frame to one peer; if that peer is gone, its reader reports it."""
        with suppress(GoneError):
            self._channels[rank].send(header, blobs)

    def send_all(self, header: dict[str, Any], blobs: Sequence[Blob] = ()) -> None:
        """Send the same header to every peer."""
        for rank in self:
            self.send(rank, header, blobs)

    def receive(self, rank: int) -> Frame:
        """Wait for the next frame of a peer, and return it."""
        return self._frames[rank].get()

    def close(self) -> None:
        """Close the channels once all peers have said farewell; to close earlier could cut off what they still read."""
        for reader in self._readers:
            reader.join()
        for channel in self._channels.values():
            channel.close()

    def _read(self, rank: int) -> None:
        while True:
            try:
                frame = self._channels[rank].receive()
            except GoneError:
                self._on_gone(rank)
                return
            self._frames[rank].put(frame)
            if frame.header.get("kind") == FAREWELL:
                return
