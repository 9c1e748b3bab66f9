"""Links between the parties of one machine: TCP over loopback, direct or delayed.

A link is a context manager that, for a number of parties, sets up connections and yields a `Wiring`.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from costmodel.engine.relay import started_relay
from costmodel.errors import UserError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A condition of a link that can hold messages for a time, one way. Raises UserError for a negative delay."""

    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.delay_s < float("inf"):
            raise UserError(f"`delay_s` must be finite and not negative, but got {self.delay_s}.")


UNHINDERED = Condition()


def refuse_condition(condition: Condition) -> None:
    """Conditions of a link that only carries. Raises UserError for any other condition than none."""
    if condition != UNHINDERED:
        raise UserError(f"this link does not delay messages, but got {condition}.")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Wiring:
    """Addresses of every rank (column) as each rank (row) knows them; its own is where it listens.

    set_condition: between passes only.
    """

    addresses: tuple[tuple[str, ...], ...]
    set_condition: Callable[[Condition], None] = refuse_condition


Link: TypeAlias = Callable[[int], AbstractContextManager[Wiring]]


@contextmanager
def tcp(num_parties: int) -> Iterator[Wiring]:
    """Yield a wiring of free ports of this machine."""
    yield Wiring(addresses=(free_addresses(num_parties),) * num_parties)


@contextmanager
def delayed(num_parties: int) -> Iterator[Wiring]:
    """Yield a wiring as `tcp` does, but a relay can delay every connection, in both directions."""
    addresses = free_addresses(num_parties)
    with started_relay() as relay:

        def delay(condition: Condition) -> None:
            relay.set_delay(condition.delay_s)

        # what a rank knows: its own address, and a port of the relay for every other rank
        known = [
            tuple(
                address if peer == rank else relay.forward(LOOPBACK, address) for peer, address in enumerate(addresses)
            )
            for rank in range(num_parties)
        ]
        yield Wiring(addresses=tuple(known), set_condition=delay)


def free_addresses(count: int) -> tuple[str, ...]:
    """Return addresses with ports of this machine that were free a moment ago."""
    sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    addresses = tuple(f"{LOOPBACK}:{listening.getsockname()[1]}" for listening in sockets)
    for listening in sockets:
        listening.close()
    return addresses
