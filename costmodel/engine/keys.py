"""Keys for TLS links: a party has its private key and the certificates of all parties, and accepts only these."""

import math
import socket
import ssl
import time
from pathlib import Path

from costmodel.config.files import MOST_YAML, open_file
from costmodel.engine.channel import Sealed
from costmodel.errors import UserError

KEY = "key.pem"
HANDSHAKE_S = 10.0  # longest handshake of an engine's connection, in seconds


class Keys:
    """A party's private key and all parties' certificates, from a folder with `key.pem` and `RANK.pem` for every rank.

    Raise UserError if a file is missing or not valid, the key is not the certificate's, or two certificates are equal.
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
        """Do the TLS handshake with party `peer`, which this party called, and return the TLS connection.

        Raise UserError if the certificate is not that of `peer`; OSError if the handshake fails otherwise, or has
        not ended by `until_s`, in seconds of the monotonic clock.
        """
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
        """Do the TLS handshake with a caller, and return the TLS connection and the caller's rank.

        Raise OSError if the certificate is not another party's, or the handshake fails or has not ended by `until_s`.
        """
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
    """Limit each wait of a handshake to end by `until_s` of the monotonic clock; no limit if that is infinite."""
    connection.settimeout(None if until_s == math.inf else max(0.01, until_s - time.monotonic()))
