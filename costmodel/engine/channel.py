"""Channels between parties beside the engine's own link: frames of a JSON header and bytes, over stream sockets.

Programs, shares and results travel here, each between the two whom they concern. A channel that ends without a
farewell means that the peer is gone, which the engine itself would only notice minutes later.
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
# of a peer whose machine is gone without a word: it is asked after 3 s, every 2 s, and given up after 3 more silences
KEEP_ALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
UNACKNOWLEDGED_MS = 9_000  # likewise, of what was sent
FAREWELL = "farewell"
JOINED_BYTES = 1 << 16  # up to which a frame is copied into one piece, to be sent at once

Blob: TypeAlias = bytes | bytearray | memoryview  # of bytes


class Frame(NamedTuple):
    """header: plain data. blobs: bytes that go with it."""

    header: dict[str, Any]
    blobs: tuple[Blob, ...] = ()


class GoneError(ConnectionError):
    """The peer has left, or does not speak as we do."""


class Channel:
    """One end of a connection. sent_bytes: so far, headers included."""

    def __init__(self, connection: socket.socket) -> None:
        if connection.family != socket.AF_UNIX:  # whose other end cannot vanish without a word
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in {**KEEP_ALIVE, "TCP_USER_TIMEOUT": UNACKNOWLEDGED_MS, "TCP_NODELAY": 1}.items():
                if hasattr(socket, name):  # Linux has all of them
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection, self.sent_bytes = connection, 0

    def send(self, header: dict[str, Any], blobs: Sequence[Blob] = ()) -> None:
        """Raises GoneError if nobody takes it."""
        head = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
        parts, size = [_LENGTH.pack(len(head)), head, *blobs], _LENGTH.size + len(head) + sum(map(len, blobs))
        try:
            for part in parts if size > JOINED_BYTES else [b"".join(parts)]:
                self._connection.sendall(part)
        except OSError as error:
            raise GoneError(str(error)) from None
        self.sent_bytes += size

    def receive(self, timeout_s: float | None = None, max_blob_bytes: float = math.inf) -> Frame:
        """The next frame. Raises GoneError if there is none, or not in time, or one of more bytes beside its header."""
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
        received = bytearray(num_bytes)
        view, have = memoryview(received), 0
        while have < num_bytes:
            if not (got := self._connection.recv_into(view[have:])):
                raise GoneError("the connection ended")
            have += got
        return received


class Peers:
    """The other parties as one of them sees them: channels by rank, each read by a thread of its own as frames come.

    So nobody waits for a party that is gone. on_gone: is told the rank of one that left without a farewell, at once
    and from that thread.
    """

    def __init__(self, channels: Mapping[int, Channel], on_gone: Callable[[int], None]) -> None:
        self._channels, self._on_gone = channels, on_gone
        self._frames: dict[int, SimpleQueue[Frame]] = {rank: SimpleQueue() for rank in channels}
        self._readers = [Thread(target=self._read, args=(rank,), daemon=True) for rank in channels]
        for reader in self._readers:
            reader.start()

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to all of them so far."""
        return sum(channel.sent_bytes for channel in self._channels.values())

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._channels))

    def send(self, rank: int, header: dict[str, Any], blobs: Sequence[Blob] = ()) -> None:
        """Sends to one of them; that it is gone is the reader's to report."""
        with suppress(GoneError):
            self._channels[rank].send(header, blobs)

    def send_all(self, header: dict[str, Any], blobs: Sequence[Blob] = ()) -> None:
        """The same to each."""
        for rank in self:
            self.send(rank, header, blobs)

    def receive(self, rank: int) -> Frame:
        """The next that this one sent; waits for it."""
        return self._frames[rank].get()

    def close(self) -> None:
        """Once all have said farewell: who closes earlier could take one from another's hands."""
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
