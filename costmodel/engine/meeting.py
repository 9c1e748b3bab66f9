"""The meeting of a session's parties: they connect to each other, and check that they agree on what to run."""

import hashlib
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeAlias

from costmodel.config.units import format_seconds
from costmodel.engine.channel import RETRY_S, Channel, Connection, RefusedError, hear_callers
from costmodel.engine.keys import Keys
from costmodel.errors import UserError
from costmodel.estimate import COST_MODEL_VERSION
from costmodel.protocols.formulas import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting

INTRODUCTION_S = 10.0  # seconds; a caller that sends nothing for so long is not a party
MOST_HEARD = 256  # largest number of connections whose callers have not yet said who they are
HELLO = "private inference"
# folders of the package whose sources decide which numbers an op graph gives: every party must have the same sources
COMPUTING = ("engine", "execution", "ops", "protocols")
LIBRARIES = {"spu": ("jax", "jaxlib", "numpy", "torch"), "crypten": ("numpy", "torch")}

Address: TypeAlias = tuple[str, int] | str  # host and port; on one machine, the path of a socket


def parse_peers(text: str, num_parties: int) -> tuple[tuple[str, int], ...]:
    """Return the hosts and ports of a text such as `host:port,host:port`, by rank.

    A party listens on its port, and its engine on the next one.

    Raise UserError for another number of peers, text that is not a host and a port, or ports that overlap.
    """
    rule = f"--peers must be {num_parties} comma-separated HOST:PORT, by rank, ports from 1 to 65534"
    peers = []
    for part in text.split(","):
        host, colon, port = part.strip().rpartition(":")
        if not (colon and host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65534):
            raise UserError(f"{rule}, but got {part.strip()!r}.")
        peers.append((host, int(port)))
    if len(peers) != num_parties:
        raise UserError(f"{rule}, but got {len(peers)}.")
    ports = {(host, taken) for host, port in peers for taken in (port, port + 1)}
    if len(ports) != 2 * num_parties:
        raise UserError(f"--peers must leave every party its port and the one after it, but got {text!r}.")
    return tuple(peers)


def is_loopback(host: str) -> bool:
    """Return whether a host is `localhost` or a loopback address such as 127.0.0.1."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def terms(protocol: str, setting: EngineSetting) -> dict[str, str]:
    """Return, by name, the versions and settings on which all parties must agree before they know what to run."""
    engine = ENGINE_PROTOCOLS[protocol].engine
    return {
        "package": _version("private-inference-nas"),
        "protocol": protocol,
        "engine": _version(engine),
        **{f"version of {name}": _version(name) for name in LIBRARIES[engine]},
        "cost model": str(COST_MODEL_VERSION),
        "sources": sources_digest(),
        "ring": f"{setting.ring_bits} bits, {setting.fraction_bits} of them fraction",
        "weights": setting.weights,
        "weight masks": setting.weight_masks,
        "device": setting.device,
    }


def sources_digest() -> str:
    """Return twelve hexadecimal digits that identify the sources in `COMPUTING`, by their names and contents."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for top in COMPUTING:
        for path in sorted((package / top).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def difference(ours: Mapping[str, str], rank: int, theirs: Mapping[str, str], peer: int) -> str | None:
    """Return a line on the first of party `rank`'s terms that party `peer` lacks or has otherwise; None without one."""
    for name, value in ours.items():
        if (other := theirs.get(name, "an unknown one")) != value:
            plain = str(other)[:80].encode("unicode_escape").decode()  # it may hold what controls a terminal
            return (
                f"the parties must have the same {name}, but party {rank} has {value} and party {peer} {plain}; "
                f"nothing was shared."
            )
    return None


def meet(
    rank: int, addresses: Sequence[Address], ours: Mapping[str, str], wait_s: float, keys: Keys | None = None
) -> dict[int, Channel]:
    """Return a channel to every other party, by rank, once their `terms` equal `ours`.

    Raise UserError, in one line, if this party cannot listen at its address or, between machines, at the next port, or
    if a party does not come within `wait_s` seconds, terms differ, somebody else answers at the address of a party of
    lower rank, or a certificate is not the expected one, or is refused. A caller that is not a party is dropped, and
    does not delay the parties. Without `keys`, a caller from another machine with other terms is dropped too, because
    it may be a stranger; the difference is reported only if the right party does not come in time.
    """
    return _Meeting(rank, addresses, ours, wait_s, keys).channels()


class _Meeting:
    def __init__(
        self, rank: int, addresses: Sequence[Address], ours: Mapping[str, str], wait_s: float, keys: Keys | None
    ) -> None:
        self.rank, self.addresses, self.ours, self.wait_s, self.keys = rank, addresses, ours, wait_s, keys
        self.until_s = time.monotonic() + wait_s
        self.others = set(range(len(addresses))) - {rank}
        self.why = {peer: "it could not be reached" if peer < rank else "it did not call" for peer in self.others}
        self.arrived: SimpleQueue[tuple[int, Channel, dict[str, Any]] | UserError] = SimpleQueue()
        self.lock, self.is_over = Lock(), False

    def channels(self) -> dict[int, Channel]:
        """Meet all parties, and return their channels."""
        met, lines = dict[int, Channel](), dict[int, str]()
        with _listening(address := self.addresses[self.rank]) as server:
            if not isinstance(address, str):
                _listening((address[0], address[1] + 1)).close()  # the engine will listen here later
            for peer in range(self.rank):
                Thread(target=self._call, args=(peer,), daemon=True).start()
            heard = (server, MOST_HEARD, lambda: not self.is_over, self._hear)
            Thread(target=hear_callers, args=heard, daemon=True).start()
            try:
                self._gather(met, lines)
                if lines:
                    raise UserError(next(iter(lines.values())))
                if missing := self.others - met.keys():
                    peer = min(missing)
                    raise UserError(
                        f"party {peer} ({shown(self.addresses[peer])}) must come within {format_seconds(self.wait_s)}, "
                        f"but did not ({self.why[peer]}); start it with --party {peer} and the same --peers"
                        f"{'' if self.keys is None else ', and --certificates'}."
                    )
            except UserError:
                for channel in met.values():
                    channel.close()
                raise
            finally:
                with self.lock:
                    self.is_over = True
                with suppress(OSError):
                    server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
                while not self.arrived.empty():
                    if not isinstance(late := self.arrived.get(), UserError):
                        late[1].close()
        return met

    def _gather(self, met: dict[int, Channel], lines: dict[int, str]) -> None:
        """Fill `met` with channels as parties come, until time is up, and `lines` with errors where terms differ."""
        while met.keys() != self.others:
            try:
                arrived = self.arrived.get(timeout=max(0.0, self.until_s - time.monotonic()))
            except Empty:
                return
            if isinstance(arrived, UserError):
                raise arrived
            peer, channel, header = arrived
            line = difference(self.ours, self.rank, header["terms"], peer)
            is_known = peer < self.rank or self.keys is not None or isinstance(self.addresses[peer], str)
            if peer in met or (line and not is_known):
                channel.close()
            else:
                met[peer] = channel
                lines.pop(peer, None)  # of somebody else
            if line and (is_known or peer not in met):
                lines[peer] = line

    def _call(self, peer: int) -> None:
        """Connect to a party, again and again until it says who it is or time is up."""
        address = self.addresses[peer]
        while not self.is_over and time.monotonic() < self.until_s:
            end: Connection | None = None
            try:
                end = connection = _connection(address, max(0.1, self.until_s - time.monotonic()))
                if self.keys is not None:
                    end = self.keys.called(connection, peer, self.until_s)
                self._greet(channel := Channel(end, 0))
                header = channel.receive(until_s=self.until_s).header
                if not _is_hello(header, {peer}):
                    raise UserError(f"{shown(address)} must be party {peer}, but is something else; check --peers.")
                self._put((peer, channel, header))
                return
            except RefusedError:
                text = (
                    f"party {peer} ({shown(address)}) must accept {self.rank}.pem of --certificates, but refused it; "
                )
                self._fail(UserError(f"{text}give all parties the same certificates."), end)
                return
            except UserError as error:
                self._fail(error, end)
                return
            except OSError as error:
                self.why[peer] = str(error.strerror or error)
                if end is not None:
                    end.close()
                time.sleep(RETRY_S)

    def _hear(self, connection: socket.socket, heard: deque[socket.socket]) -> None:
        until_s = min(self.until_s, time.monotonic() + INTRODUCTION_S)
        expected, channel = {peer for peer in self.others if peer > self.rank}, None
        try:
            if self.keys is None:
                channel = Channel(connection, 0)
            else:
                sealed, peer = self.keys.accepted(connection.dup(), until_s)  # a flood may still end this one
                channel, expected = Channel(sealed, 0), expected & {peer}
            header = channel.receive(until_s=until_s).header
            if _is_hello(header, expected):
                heard.remove(connection)  # from now on, it is not ended by a flood; a ValueError says that it was
                self._greet(channel)
                self._put((header["rank"], channel, header))
                return
        except (OSError, ValueError) as error:
            if self.keys is not None:
                for peer in expected:
                    self.why[peer] = f"who called was no party: {getattr(error, 'reason', None) or error}"
        finally:
            with suppress(ValueError):
                heard.remove(connection)
            if self.keys is not None:
                connection.close()
        (connection if channel is None else channel).close()

    def _greet(self, channel: Channel) -> None:
        channel.send({"kind": HELLO, "rank": self.rank, "terms": dict(self.ours)})

    def _put(self, arrived: tuple[int, Channel, dict[str, Any]]) -> None:
        with self.lock:
            if self.is_over:
                arrived[1].close()
            else:
                self.arrived.put(arrived)

    def _fail(self, error: UserError, end: Connection | None) -> None:
        if end is not None:
            end.close()
        self.arrived.put(error)


def _is_hello(header: dict[str, Any], expected: set[int]) -> bool:
    rank = header.get("rank")
    is_expected = type(rank) is int and rank in expected  # True is not a rank, nor is a list
    return header.get("kind") == HELLO and is_expected and isinstance(header.get("terms"), dict)


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]  # what follows is the build of torch, such as for a CPU
    except PackageNotFoundError:
        return "unknown"


def _listening(address: Address) -> socket.socket:
    try:
        return socket.create_server(address, family=socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    except OSError as error:
        raise UserError(
            f"party cannot listen at {shown(address)}: {error.strerror or error}; free it or choose another port."
        ) from None


def _connection(address: Address, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    try:
        connection.settimeout(timeout_s)
        connection.connect(address)
        connection.settimeout(None)
    except OSError:
        connection.close()
        raise
    return connection


def shown(address: Address) -> str:
    """Return an address as users write it: `host:port`, or the path of a socket."""
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"
