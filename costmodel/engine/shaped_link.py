"""A link of limited bandwidth: a network namespace per party, and a pair of virtual interfaces between every two.

A token bucket at both ends lets each direction of each pair carry at most so many bits a second (full duplex). Of
these TCP carries 0.956 one way, the rest being headers, and about 0.92 while both directions are full.

Needs root and Linux's `ip`, `tc`, `unshare` and `nsenter`. The namespaces have no names: they live as long as the
relay that is started in each, which delays messages (the kernel's own `netem` is not everywhere) and ends with its
stdin, so that nothing is left behind, whatever happens to us.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations

from costmodel.engine.links import Condition, Wiring
from costmodel.engine.relay import Relay, started_relay
from costmodel.errors import UserError

PROGRAMS = ("ip", "tc", "unshare", "nsenter")
PORT = 9100  # of every party: a namespace has all its ports free
BURST_BYTES = 4_096  # that pass at once, two frames and a half: small messages too take their time
CONGESTION_CONTROL = "reno"  # in every kernel, and does not pace: the token bucket alone decides
QUEUE_BYTES = 64_000_000  # more than TCP ever has in flight: nothing is dropped
QUEUE_PACKETS = 100_000  # likewise, without a limit


def why_not() -> str | None:
    """Why no namespace can be made here, or None."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"a rate-limited link needs Linux's {', '.join(PROGRAMS)}, but {', '.join(missing)} cannot be found"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"a rate-limited link needs root, to make network namespaces: {done.stderr.strip()}"
    return None


@contextmanager
def shaped(num_parties: int) -> Iterator[Wiring]:
    """A process per party, each in a network namespace of its own.

    Raises UserError, with the reason, where that is not possible.
    """
    if (reason := why_not()) is not None:
        raise UserError(f"{reason}.")
    with ExitStack() as stack:
        relays = [stack.enter_context(_namespace()) for _ in range(num_parties)]
        for low, high in combinations(range(num_parties), 2):
            _join(low, high, relays)
        yield Wiring(
            addresses=_addresses(relays),
            prefixes=tuple(_inside(relay) for relay in relays),
            set_condition=lambda condition: _set(condition, relays),
        )


@contextmanager
def _namespace() -> Iterator[Relay]:
    with started_relay(("unshare", "--net", sys.executable)) as relay:
        relay.set_delay(0.0)  # answered, so it runs in its namespace
        _in(relay, "ip", "link", "set", "lo", "up")
        _in(relay, "sh", "-c", f"echo {CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control")
        yield relay


def _join(low: int, high: int, relays: list[Relay]) -> None:
    """A pair of interfaces, one end in each namespace."""
    far = ["peer", "name", f"to{low}", "netns", str(relays[high].process.pid)]
    _in(relays[low], "ip", "link", "add", f"to{high}", "type", "veth", *far)
    for rank, peer in ((low, high), (high, low)):
        _in(relays[rank], "ip", "address", "add", f"{host(rank, peer)}/30", "dev", f"to{peer}")
        _in(relays[rank], "ip", "link", "set", f"to{peer}", "up")


def host(rank: int, peer: int) -> str:
    """The address of a rank on its interface towards a peer."""
    low, high = sorted((rank, peer))
    return f"10.{low}.{high}.{1 if rank == low else 2}"


def _addresses(relays: list[Relay]) -> tuple[tuple[str, ...], ...]:
    """The addresses that a rank knows the others by: the relay beside each, on the interface that leads there."""
    listening, ranks = f"127.0.0.1:{PORT}", range(len(relays))
    return tuple(
        tuple(listening if peer == rank else relays[peer].forward(host(peer, rank), listening) for peer in ranks)
        for rank in ranks
    )


def _set(condition: Condition, relays: list[Relay]) -> None:
    for rank, relay in enumerate(relays):
        relay.set_delay(condition.delay_s)
        for peer in range(len(relays)):
            if peer != rank:
                _limit(relay, f"to{peer}", condition.bandwidth_bits_per_s)


def _limit(relay: Relay, interface: str, bandwidth_bits_per_s: float | None) -> None:
    """Limits what leaves by an interface."""
    if bandwidth_bits_per_s is None:
        queue = ["pfifo", "limit", str(QUEUE_PACKETS)]
    else:
        rate = f"{bandwidth_bits_per_s:.0f}bit"
        queue = ["tbf", "rate", rate, "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]
    _in(relay, "tc", "qdisc", "replace", "dev", interface, "root", *queue)


def _inside(relay: Relay) -> tuple[str, ...]:
    """The command that runs another in the relay's namespace."""
    return ("nsenter", f"--net=/proc/{relay.process.pid}/ns/net")


def _in(relay: Relay, *command: str) -> None:
    done = subprocess.run([*_inside(relay), *command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"a rate-limited link is not possible here: `{' '.join(command)}`: {done.stderr.strip()}")
