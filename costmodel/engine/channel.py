"""Channels between two parties, or a party and its parent process, beside the link that SecretFlow-SPU opens itself.

A message, here a *frame*, is a JSON header with blobs of bytes. Channels carry programs, shares and results; under
CrypTen, also the numbers that ops open and the masks that the dealer sends. If a channel between parties closes before
the peer has sent its farewell, the peer is gone, which SecretFlow-SPU itself would notice only minutes later.
"""

import json
import math
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any, NamedTuple, TypeAlias

from costmodel.config.units import format_bytes, format_seconds

MAX_HEADER_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")
# A silent peer is probed after 3 s, then every 2 s, and given up after 3 unanswered probes: its machine may be gone.
KEEP_ALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
UNACKNOWLEDGED_MS = 9_000  # a peer that does not acknowledge data for so long is given up
LEAVE, FAREWELL = "leave", "farewell"  # kinds of frames: the client's command to end, and the last frame of every party
ALIVE = "alive"  # kind of a frame that says only that the sender is alive; every party sends it again and again
BEAT_S = 0.5  # seconds between two such frames
JOINED_BYTES = 1 << 16  # a frame of up to this size is copied into one piece and sent at once
TLS_PIECE_BYTES = 1 << 16  # bytes that one call encrypts
PIECE_BYTES = 1 << 20  # memory for a blob grows from this size as its bytes come

RETRY_S = 0.02  # seconds between two attempts to connect to a party that does not listen yet, or to accept a connection

Blob: TypeAlias = bytes | bytearray | memoryview  # the last with items of one byte


def hear_callers(
    server: socket.socket,
    most: int,
    is_open: Callable[[], bool],
    hear: Callable[[socket.socket, deque[socket.socket]], object],
) -> None:
    """Accept connections, and call `hear` for each in a thread, until the server is closed and `is_open` returns false.

    hear: called with a connection and the queue of connections whose callers have not yet said who they are; it must
        remove its own connection from the queue.
    most: largest length of the queue; if it gets longer, its oldest connection is removed and shut down.
    """
    waiting = deque[socket.socket]()
    while is_open():
        try:
            connection, _ = server.accept()
        except OSError:  # the server was closed, or a flood has taken all descriptors
            time.sleep(RETRY_S)
            continue
        waiting.append(connection)
        if len(waiting) > most:
            with suppress(OSError):
                waiting.popleft().shutdown(socket.SHUT_RDWR)
        Thread(target=hear, args=(connection, waiting), daemon=True).start()


class Frame(NamedTuple):
    """A message: a header of plain data, and the blobs of bytes that belong to it."""

    header: dict[str, Any]
    blobs: tuple[Blob, ...] = ()


class GoneError(ConnectionError):
    """The peer has left, or a frame could not be sent or did not come in time; the text gives the cause."""


class BrokenError(GoneError):
    """The peer was silent for too long, or sent a frame that is not valid or too large; the text says which."""


class RefusedError(GoneError):
    """The peer sent a TLS alert, as when it does not accept this party's certificate."""


class Sealed:
    """A TLS connection that one thread may read while another writes, which `ssl.SSLSocket` by itself does not allow.

    It has the socket methods that channels and relays use. Unlike a socket's, its `recv_into` never waits.
    """

    def __init__(self, connection: ssl.SSLSocket) -> None:
        connection.setblocking(False)
        self._connection, self._lock = connection, Lock()
        self.setsockopt, self.fileno = connection.setsockopt, connection.fileno
        self.close = connection.close

    @property
    def family(self) -> int:
        return self._connection.family

    def shutdown(self, how: int) -> None:
        """Shut down TCP but not TLS, unlike `ssl.SSLSocket`: what arrives after SHUT_WR is still decrypted."""
        super(ssl.SSLSocket, self._connection).shutdown(how)

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        """Receive the bytes that have come, and return their number: 0 if the peer has ended the connection.

        Raise BlockingIOError if none have come, RefusedError for a TLS alert, and GoneError for other errors of TLS.
        """
        try:
            with self._lock:
                return self._connection.recv_into(buffer, nbytes)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise (RefusedError if "ALERT" in (error.reason or "") else GoneError)(str(error)) from None

    def recv(self, num_bytes: int) -> bytes:
        """Wait for bytes and return at most `num_bytes` of them, or `b''` once the peer has ended the connection."""
        buffer = bytearray(num_bytes)
        while True:
            try:
                return bytes(buffer[: self.recv_into(memoryview(buffer))])
            except BlockingIOError:
                self._wait(select.POLLIN)

    def sendall(self, data: Blob, /) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), TLS_PIECE_BYTES):
            piece = view[start : start + TLS_PIECE_BYTES]
            while piece:
                try:
                    with self._lock:
                        piece = piece[self._connection.send(piece) :]
                except ssl.SSLWantWriteError:
                    self._wait(select.POLLOUT)
                except ssl.SSLWantReadError:
                    self._wait(select.POLLIN)

    def __enter__(self) -> "Sealed":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait(self, event: int) -> None:
        (waiting := select.poll()).register(self.fileno(), event)
        waiting.poll()


Connection: TypeAlias = socket.socket | Sealed


class Channel:
    """One end of a connection. `sent_bytes` counts the bytes of all frames that `send` sent, headers included.

    max_blob_bytes: largest number of bytes that the blobs of a received frame may have together.
    """

    def __init__(self, connection: Connection, max_blob_bytes: float = math.inf) -> None:
        if connection.family != socket.AF_UNIX:  # there, the other end cannot vanish unnoticed
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in {**KEEP_ALIVE, "TCP_USER_TIMEOUT": UNACKNOWLEDGED_MS, "TCP_NODELAY": 1}.items():
                if hasattr(socket, name):  # Linux has all of them
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection, self.max_blob_bytes, self.sent_bytes = connection, max_blob_bytes, 0
        self._sending, self._has_parted = Lock(), False

    def send(self, header: dict[str, Any], blobs: Sequence[Blob] = ()) -> None:
        """Send a frame. Raise GoneError if it cannot be sent."""
        head = json.dumps({**header, "sizes": [len(blob) for blob in blobs]}).encode()
        parts, size = [_LENGTH.pack(len(head)), head, *blobs], _LENGTH.size + len(head) + sum(map(len, blobs))
        with self._sending:
            self._has_parted |= header.get("kind") == FAREWELL
            try:
                for part in parts if size > JOINED_BYTES else [b"".join(parts)]:
                    self._connection.sendall(part)
            except OSError as error:
                raise GoneError(str(error)) from None
            self.sent_bytes += size

    def beat(self) -> None:
        """Send the peer a frame of kind ALIVE, unless a farewell was sent. Raise OSError if the peer is gone."""
        head = json.dumps({"kind": ALIVE, "sizes": []}).encode()
        with self._sending:
            if not self._has_parted:
                self._connection.sendall(_LENGTH.pack(len(head)) + head)

    def receive(self, *, until_s: float = math.inf, idle_s: float = math.inf) -> Frame:
        """Return the next frame. Frames that say only that the peer is alive are skipped.

        Raise GoneError if no frame has come by `until_s` (in seconds of the monotonic clock), or the peer has left;
        BrokenError if no byte comes for `idle_s` seconds, or the bytes are not a valid frame or too many.
        """
        try:
            while True:
                (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, until_s, idle_s))
                if length > MAX_HEADER_BYTES:
                    raise BrokenError("sent what is no frame")
                header = json.loads(self._exactly(length, until_s, idle_s))
                sizes = header.pop("sizes")
                if not all(type(size) is int and size >= 0 for size in sizes):
                    raise BrokenError("sent what is no frame")
                if (size := sum(sizes)) > self.max_blob_bytes:
                    most = format_bytes(self.max_blob_bytes)
                    raise BrokenError(f"sent a frame of {size:.3g} bytes, of which no op here needs more than {most}")
                blobs = tuple(self._exactly(size, until_s, idle_s) for size in sizes)
                if header.get("kind") != ALIVE:
                    return Frame(header, blobs)
        except GoneError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise BrokenError("sent what is no frame") from None
        except OSError as error:
            raise GoneError(str(error)) from None

    def close(self) -> None:
        self._connection.close()

    def _exactly(self, num_bytes: int, until_s: float, idle_s: float) -> bytearray:
        received, have = bytearray(), 0
        while have < num_bytes:
            received += bytes(min(num_bytes - have, max(have, PIECE_BYTES)))
            with memoryview(received) as view:
                while have < len(view):
                    have += self._some(view[have:], until_s, idle_s)
        return received

    def _some(self, view: memoryview, until_s: float, idle_s: float) -> int:
        """Receive bytes and return their number. Seconds in which this process was stopped do not count as silence."""
        silent_s = 0.0
        while True:
            with suppress(BlockingIOError):
                if got := self._connection.recv_into(view, 0, socket.MSG_DONTWAIT):
                    return got
                raise GoneError("the connection ended")
            if (left_s := until_s - time.monotonic()) <= 0:
                raise GoneError("it said nothing")
            if silent_s >= idle_s:
                raise BrokenError(f"has been silent for {format_seconds(idle_s)}")
            (waiting := select.poll()).register(self._connection.fileno(), select.POLLIN)
            if not waiting.poll(math.ceil(1000 * min(BEAT_S, left_s))):
                silent_s += BEAT_S


class Peers:
    """One party's channels to all others, by rank; a thread for each channel reads frames as they come.

    If a peer leaves without a farewell, is silent for `idle_s` seconds, or sends a frame that is invalid or too large,
    the thread of its channel calls `on_gone` at once, with the peer's rank and the exception. So no party waits for a
    peer that is gone. Other threads tell every peer that this party is alive, as long as `is_awake()` is true.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        on_gone: Callable[[int, Exception], None],
        idle_s: float = math.inf,
        is_awake: Callable[[], bool] = lambda: True,
    ) -> None:
        self.channels, self._on_gone, self._idle_s, self._is_awake = channels, on_gone, idle_s, is_awake
        self._frames: dict[int, SimpleQueue[Frame]] = {rank: SimpleQueue() for rank in channels}
        self._readers = [Thread(target=self._read, args=(rank,), daemon=True) for rank in channels]
        for reader in self._readers:
            reader.start()
        self._is_over = Event()
        for channel in channels.values():  # a thread each: a peer that does not read delays only its own
            Thread(target=self._beat, args=(channel,), daemon=True).start()

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to all peers so far."""
        return sum(channel.sent_bytes for channel in self.channels.values())

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.channels))

    def send(self, rank: int, header: dict[str, Any], blobs: Sequence[Blob] = ()) -> None:
        """Send a frame to one peer. If that peer is gone, nothing is raised, since `on_gone` reports it."""
        with suppress(GoneError):
            self.channels[rank].send(header, blobs)

    def send_all(self, header: dict[str, Any], blobs: Sequence[Blob] = ()) -> None:
        """Send the same frame to every peer."""
        for rank in self:
            self.send(rank, header, blobs)

    def receive(self, rank: int) -> Frame:
        """Wait for the next frame of a peer, for as long as it takes, and return it."""
        return self._frames[rank].get()

    def close(self) -> None:
        """Close the channels once every peer has sent its farewell or is gone; until then, peers may still read."""
        for reader in self._readers:
            reader.join()
        self._is_over.set()
        for channel in self.channels.values():
            channel.close()

    def _read(self, rank: int) -> None:
        try:
            while True:
                frame = self.channels[rank].receive(idle_s=self._idle_s)
                self._frames[rank].put(frame)
                if frame.header.get("kind") == FAREWELL:
                    return
        except Exception as error:  # such as a lack of memory; otherwise nobody would notice that this thread ended
            self._on_gone(rank, error)

    def _beat(self, channel: Channel) -> None:
        with suppress(OSError):  # the reader reports a peer that is gone
            while not self._is_over.wait(BEAT_S):
                if self._is_awake():
                    channel.beat()
