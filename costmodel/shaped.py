"""A link of limited bandwidth: parties in network namespaces, their virtual ports joined by a bridge.

A token bucket at both ends of every port lets a party send and receive at most so many bits a second each (full
duplex). Of these TCP carries 0.956 one way, the rest being headers, and about 0.92 while both directions are full.

Needs root and Linux's `ip`, `tc`, `unshare` and `nsenter`. The namespaces have no names: they live as long as the
relay that is started in each, which delays messages (the kernel's own `netem` is not everywhere) and ends with its
stdin, so that nothing is left behind, whatever happens to us.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from costmodel.links import Condition, Wiring, apart
from costmodel.relay import Relay, started_relay

PROGRAMS = ("ip", "tc", "unshare", "nsenter")
INTERFACE, BRIDGE = "wire", "bridge"
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

    Raises ValueError, with the reason, where that is not possible.
    """
    if (reason := why_not()) is not None:
        raise ValueError(f"{reason}.")
    with ExitStack() as stack:
        hub, *relays = (stack.enter_context(_namespace()) for _ in range(num_parties + 1))
        _in(hub, "ip", "link", "add", BRIDGE, "type", "bridge")
        _in(hub, "ip", "link", "set", BRIDGE, "up")
        for rank, relay in enumerate(relays):
            _plug(rank, relay, hub)
        yield Wiring(
            groups=apart(num_parties),
            addresses=_addresses(relays),
            prefixes=tuple(_inside(relay) for relay in relays),
            set_condition=lambda condition: _set(condition, relays, hub),
        )


@contextmanager
def _namespace() -> Iterator[Relay]:
    with started_relay(("unshare", "--net", sys.executable)) as relay:
        relay.set_delay(0.0)  # answered, so it runs in its namespace
        _in(relay, "ip", "link", "set", "lo", "up")
        _in(relay, "sh", "-c", f"echo {CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control")
        yield relay


def _plug(rank: int, relay: Relay, hub: Relay) -> None:
    """A pair of interfaces, one end with the party and one at the bridge."""
    far = ["peer", "name", _port(rank), "netns", str(hub.process.pid)]
    _in(relay, "ip", "link", "add", INTERFACE, "type", "veth", *far)
    _in(relay, "ip", "address", "add", f"{_host(rank)}/24", "dev", INTERFACE)
    _in(relay, "ip", "link", "set", INTERFACE, "up")
    _in(hub, "ip", "link", "set", _port(rank), "master", BRIDGE, "up")


def _host(rank: int) -> str:
    return f"10.0.0.{rank + 1}"


def _port(rank: int) -> str:
    """The hub's end of a party's interface."""
    return f"port{rank}"


def _addresses(relays: list[Relay]) -> tuple[tuple[str, ...], ...]:
    """What a rank knows the others by: the relay beside each."""
    own = f"127.0.0.1:{PORT}"
    relayed = [relay.forward(_host(rank), own) for rank, relay in enumerate(relays)]
    ranks = range(len(relays))
    return tuple(tuple(own if peer == rank else relayed[peer] for peer in ranks) for rank in ranks)


def _set(condition: Condition, relays: list[Relay], hub: Relay) -> None:
    for rank, relay in enumerate(relays):
        relay.set_delay(condition.delay_s)
        _limit(relay, INTERFACE, condition.bandwidth_bits_per_s)
        _limit(hub, _port(rank), condition.bandwidth_bits_per_s)


def _limit(relay: Relay, interface: str, bandwidth_bits_per_s: float | None) -> None:
    """Of what leaves by an interface."""
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
        raise ValueError(f"a rate-limited link is not possible here: `{' '.join(command)}`: {done.stderr.strip()}")
