"""Keys of parties for links by TLS: each party has a private key, and the certificates of all, which are pinned."""

import math
import select
import socket
import ssl
import time
from pathlib import Path
from threading import Lock

from costmodel.config.files import MOST_YAML, open_file
from costmodel.engine.channel import Blob, GoneError
from costmodel.errors import UserError

KEY = "key.pem"
TLS_PIECE_BYTES = 1 << 16  # what one call encrypts
HANDSHAKE_S = 10.0  # of an engine's connection


class RefusedError(GoneError):
    """The peer does not accept our certificate."""


class Sealed:
    """A TLS connection that one thread may read while another writes, which `ssl.SSLSocket` by itself does not allow.

    It has those methods of sockets that channels and relays use; `recv_into` never waits.
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
        """End a direction of the connection below, and leave the other one encrypted, unlike `ssl.SSLSocket`."""
        super(ssl.SSLSocket, self._connection).shutdown(how)

    def recv_into(self, buffer: memoryview, nbytes: int = 0, flags: int = 0, /) -> int:
        """Receive the bytes that have come. Raise BlockingIOError if there are none, RefusedError if we are refused."""
        try:
            with self._lock:
                return self._connection.recv_into(buffer, nbytes)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise (RefusedError if "ALERT" in (error.reason or "") else GoneError)(str(error)) from None

    def recv(self, num_bytes: int) -> bytes:
        """Wait for some bytes and return them; none once the peer has ended."""
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


class Keys:
    """A party's key and everybody's certificates, of a folder with `key.pem` and, for every rank, `RANK.pem`.

    Raise UserError if a file is absent or is not what it must be.
    """

    def __init__(self, folder: Path, rank: int, num_parties: int) -> None:
        self.rank, names = rank, {each: folder / f"{each}.pem" for each in range(num_parties)}
        rule = f"--certificates must be a folder with {KEY} and {', '.join(path.name for path in names.values())}"
        for path in (*names.values(), folder / KEY):
            if path.exists():
                open_file(path, MOST_YAML).close()
        try:
            texts = {each: path.read_text() for each, path in names.items()}
            self.pinned = {
                ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN") :]): each for each, text in texts.items()
            }
            contexts = [ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)]
            for context in contexts:
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED  # a certificate says who it is
                context.load_cert_chain(names[rank], folder / KEY, password=lambda: b"")
                context.load_verify_locations(cadata="\n".join(texts.values()))
        except (OSError, ValueError) as error:  # among them those of ssl
            why = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
            where = getattr(error, "filename", None) or folder
            raise UserError(f"{rule}, but {where} does not fit: {why}.") from None
        if len(self.pinned) < num_parties:
            raise UserError(f"{rule}, each of another key, but two of them are equal in {folder}.")
        self._as_server, self._as_client = contexts

    def called(self, connection: socket.socket, peer: int, until_s: float) -> Sealed:
        """Return the TLS connection to a party that this party called. Raise UserError if somebody else answers."""
        _limit(connection, until_s)
        try:
            made = self._as_client.wrap_socket(connection)
        except ssl.SSLCertVerificationError as error:
            raise UserError(self._other(peer, error.verify_message)) from None
        if self.pinned.get(made.getpeercert(binary_form=True) or b"") != peer:
            made.close()
            raise UserError(self._other(peer, "it is another party's"))
        return Sealed(made)

    def accepted(self, connection: socket.socket, until_s: float) -> tuple[Sealed, int]:
        """Return the TLS connection to a party that called, and its rank. Raise OSError if the caller is no party."""
        _limit(connection, until_s)
        made = self._as_server.wrap_socket(connection, server_side=True)
        peer = self.pinned.get(made.getpeercert(binary_form=True) or b"", self.rank)
        if peer == self.rank:
            made.close()
            raise OSError("its certificate is no other party's")
        return Sealed(made), peer

    def _other(self, peer: int, why: str) -> str:
        return (
            f"party {peer} must have the certificate {peer}.pem of --certificates, but showed another ({why}); nothing "
            f"was shared. Give all parties the same certificates."
        )


def _limit(connection: socket.socket, until_s: float) -> None:
    """Let a handshake take no longer than until a time of the monotonic clock."""
    connection.settimeout(None if until_s == math.inf else max(0.01, until_s - time.monotonic()))
