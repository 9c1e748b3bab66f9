"""The meeting of a session's parties: they connect to each other, and check that they agree on what to run."""

import hashlib
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeAlias

from costmodel.config.units import format_seconds
from costmodel.engine.channel import Channel, GoneError
from costmodel.errors import UserError
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.identity import COST_MODEL_VERSION
from costmodel.protocols.primitives import EngineSetting

INTRODUCTION_S = 2.0  # whoever connects and sends nothing for so long is not a party
RETRY_S = 0.1  # between two attempts to connect to a party that does not listen yet
HELLO = "private inference"
# What decides which numbers an op graph gives, below the package's folder: every party must have the same.
COMPUTING = ("engine", "execution", "ops", "protocols", "rotary.py")
LIBRARIES = {"spu": ("jax", "jaxlib", "numpy", "torch"), "crypten": ("numpy", "torch")}

Address: TypeAlias = tuple[str, int] | str  # host and port; on one machine, the path of a socket


def parse_peers(text: str, num_parties: int) -> tuple[tuple[str, int], ...]:
    """Return the hosts and ports of `host:port,host:port`, by rank. The engine listens on the port after each.

    Raise UserError for another number of peers, or text that is not a host and a port.
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
    """Return whether a host is this machine, by name or number."""
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def terms(protocol: str, setting: EngineSetting) -> dict[str, str]:
    """Return, in words, the terms that all parties must share before they know what to run."""
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
    """Return twelve hexadecimal digits that identify the sources that compute, by their names and contents."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for top in COMPUTING:
        for path in sorted([package / top] if top.endswith(".py") else (package / top).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def require_equal(ours: Mapping[str, str], rank: int, theirs: Mapping[str, str], peer: int) -> None:
    """Raise UserError, naming the first difference, unless both parties have the same terms."""
    for name, value in ours.items():
        if (other := theirs.get(name, "an unknown one")) != value:
            plain = str(other)[:80].encode("unicode_escape").decode()  # it may hold what controls a terminal
            raise UserError(
                f"the parties must have the same {name}, but party {rank} has {value} and party {peer} {plain}; "
                f"nothing was shared."
            )


def meet(rank: int, addresses: Sequence[Address], ours: Mapping[str, str], wait_s: float) -> dict[int, Channel]:
    """Return a channel to every other party, by rank, once their `terms` equal `ours`.

    Raise UserError, in one line, if a port is in use, a party does not come in time, or terms differ.
    """
    deadline, channels = time.monotonic() + wait_s, dict[int, Channel]()
    with _listening(address := addresses[rank]) as server:
        if not isinstance(address, str):
            _listening((address[0], address[1] + 1)).close()  # the engine will listen here later
        try:
            for peer in range(rank):
                channels[peer] = _reached(addresses, peer, deadline, wait_s)
                _greet(channels[peer], rank, ours)
                require_equal(ours, rank, _hello(channels[peer], peer, addresses, deadline, wait_s)["terms"], peer)
            while missing := set(range(len(addresses))) - {rank, *channels}:
                channel = Channel(_accepted(server, min(missing), addresses, deadline, wait_s))
                if (hello := _introduction(channel, missing)) is None:
                    channel.close()
                    continue
                channels[hello["rank"]] = channel
                _greet(channel, rank, ours)
                require_equal(ours, rank, hello["terms"], hello["rank"])
        except (UserError, GoneError) as error:
            for channel in channels.values():
                channel.close()
            left = f"a party has left before all had met ({error}); see what it says, and start all again."
            raise (error if isinstance(error, UserError) else UserError(left)) from None
    return channels


def _greet(channel: Channel, rank: int, ours: Mapping[str, str]) -> None:
    channel.send({"kind": HELLO, "rank": rank, "terms": dict(ours)})


def _introduction(channel: Channel, expected: set[int]) -> dict[str, Any] | None:
    """Return the hello of one of the expected parties; None if somebody else connected."""
    try:
        hello = channel.receive(INTRODUCTION_S, max_blob_bytes=0).header
    except GoneError:
        return None
    return hello if _is_hello(hello, expected) else None


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


def _reached(addresses: Sequence[Address], peer: int, deadline: float, wait_s: float) -> Channel:
    while True:
        try:
            return Channel(_connection(addresses[peer], max(0.1, deadline - time.monotonic())))
        except OSError as error:
            if time.monotonic() + RETRY_S >= deadline:
                raise UserError(_absent(addresses, peer, wait_s, str(error.strerror or error))) from None
            time.sleep(RETRY_S)


def _connection(address: Address, timeout_s: float) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address, timeout=timeout_s)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _hello(channel: Channel, peer: int, addresses: Sequence[Address], deadline: float, wait_s: float) -> dict[str, Any]:
    try:
        header = channel.receive(max(0.1, deadline - time.monotonic()), max_blob_bytes=0).header
    except GoneError as error:
        raise UserError(_absent(addresses, peer, wait_s, str(error))) from None
    if not _is_hello(header, {peer}):
        raise UserError(f"{shown(addresses[peer])} must be party {peer}, but is something else; check --peers.")
    return header


def _accepted(
    server: socket.socket, missing: int, addresses: Sequence[Address], deadline: float, wait_s: float
) -> socket.socket:
    server.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        connection, _ = server.accept()
    except TimeoutError:
        raise UserError(_absent(addresses, missing, wait_s, "it did not call")) from None
    connection.settimeout(None)
    return connection


def _absent(addresses: Sequence[Address], peer: int, wait_s: float, why: str) -> str:
    return (
        f"party {peer} ({shown(addresses[peer])}) must come within {format_seconds(wait_s)}, but did not ({why}); "
        f"start it with --party {peer} and the same --peers."
    )


def shown(address: Address) -> str:
    """Return an address as users write it."""
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"
