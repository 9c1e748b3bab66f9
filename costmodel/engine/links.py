"""Links between the parties of one machine: TCP over loopback, direct or delayed; and tunnels between machines.

A link is a context manager that, for a number of parties, sets up connections and yields a `Wiring`.
"""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from costmodel.engine.keys import HANDSHAKE_S, Keys, Sealed
from costmodel.engine.relay import Relay
from costmodel.errors import UserError

LOOPBACK = "127.0.0.1"
UNHINDERED = 0.0  # seconds that a message is held


def refuse_delay(delay_s: float) -> None:
    """Raise UserError for any delay other than none, on a link that cannot delay messages."""
    if delay_s != UNHINDERED:
        raise UserError(f"this link does not delay messages, but got {delay_s} s.")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Wiring:
    """The addresses of every rank (column) as each rank (row) knows them; a rank's own is where it listens.

    set_delay: sets the one-way delay of every message, in seconds; only between passes.
    """

    addresses: tuple[tuple[str, ...], ...]
    set_delay: Callable[[float], None] = refuse_delay


Link: TypeAlias = Callable[[int], AbstractContextManager[Wiring]]


@contextmanager
def tcp(num_parties: int) -> Iterator[Wiring]:
    """Yield a wiring of free ports of this machine."""
    yield Wiring(addresses=(free_addresses(num_parties),) * num_parties)


@contextmanager
def delayed(num_parties: int) -> Iterator[Wiring]:
    """Yield a wiring as `tcp` does, in which a relay can delay every connection, in both directions."""
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
    """Return addresses of this machine that lead to all parties by TLS; this party listens at its own.

    The relay takes the place of this party at its own address.
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
    """Return addresses with ports of this machine that were free a moment ago."""
    sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    addresses = tuple(f"{LOOPBACK}:{listening.getsockname()[1]}" for listening in sockets)
    for listening in sockets:
        listening.close()
    return addresses
