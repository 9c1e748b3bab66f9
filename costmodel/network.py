"""The link between the parties, and the seconds that communication takes on it.

    network seconds = waited bytes x 8 / bandwidth + rounds x RTT / 2

A round waits for one message, half a round trip. Bytes that both parties send at once count once on a full-duplex link,
and share the bandwidth of a half-duplex link. Communication is assumed not to overlap with computing.
"""

import math
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from costmodel.config.files import load_file
from costmodel.config.units import parse_bits_per_s, parse_delay
from costmodel.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A network in which each pair of parties has its own link; all links are equal.

    Attributes:
        bandwidth_bits_per_s: Bits per second of TCP payload, without headers and slow start, in each direction of a
            full-duplex link, or in both directions together of a half-duplex link.
        rtt_s: Round-trip time of an empty message.
        source: Where the figures come from.

    Raises:
        UserError: If the bandwidth is not positive, or the RTT is negative or not finite.
    """

    name: str
    bandwidth_bits_per_s: float
    rtt_s: float
    duplex: Literal["full", "half"] = "full"
    source: str

    def __post_init__(self) -> None:
        if not self.bandwidth_bits_per_s > 0:
            raise UserError(f"`bandwidth_bits_per_s` must be positive, but got {self.bandwidth_bits_per_s}.")
        if not 0 <= self.rtt_s < math.inf:
            raise UserError(f"`rtt_s` must be at least 0 and finite, but got {self.rtt_s}.")


_CHEETAH = "Huang et al. 2022, Cheetah, https://eprint.iacr.org/2022/207"
_BUMBLEBEE = "Lu et al. 2025, BumbleBee, https://eprint.iacr.org/2023/1678"
_SIGMA = "Gupta et al. 2024, SIGMA, https://eprint.iacr.org/2023/1269"
_ONE_MACHINE = "both parties in one machine: what their link costs is in the testbed's compute seconds"
_AERO = (
    "arXiv 2410.13060 and 2501.03489 as stated; the latencies they print cannot come from it, since 25.32 GB take 33.8 "
    "minutes at 100 Mbit/s and 8.21 are printed"
)
NETWORKS: dict[str, Network] = {
    name: Network(name=name, bandwidth_bits_per_s=bits_per_s, rtt_s=rtt_s, source=source)
    for name, bits_per_s, rtt_s, source in (
        ("loopback", math.inf, 0.0, _ONE_MACHINE),
        ("lan", 1e9, 0.5e-3, f"{_BUMBLEBEE}, LAN of the evaluation"),
        ("wan", 352e6, 40e-3, f"{_CHEETAH}, WAN of the evaluation: 44 MB/s"),
        ("cheetah-lan", 3.072e9, 0.3e-3, f"{_CHEETAH}, LAN of the evaluation: 384 MB/s"),
        ("bumblebee-wan", 400e6, 4e-3, f"{_BUMBLEBEE}, WAN of the evaluation"),
        ("sigma-lan", 9.4e9, 0.05e-3, f"{_SIGMA}, LAN of the evaluation"),
        ("sigma-wan", 305e6, 60e-3, f"{_SIGMA}, WAN of the evaluation"),
        ("aero-stated", 100e6, 80e-3, _AERO),
    )
}


def load_network(name_or_path: str | Network | None) -> Network:
    """Return a preset by name (None: `lan`), or the network in a `.yaml` file with the fields of `Network` as keys.

    A Network is returned as it is. A UserError is raised for text that is neither, or a file that is not valid.
    """
    if isinstance(name_or_path, Network):
        return name_or_path
    name_or_path = "lan" if name_or_path is None else name_or_path
    if name_or_path in NETWORKS:
        return NETWORKS[name_or_path]
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"network must be one of {', '.join(NETWORKS)} or a .yaml file, but got {name_or_path!r}.")
    if not os.path.isfile(path):  # also false for a name that is too long
        keys = ", ".join(field.name for field in fields(Network))
        raise UserError(f"network {name_or_path!r} must be an existing file with the keys {keys}.")
    return load_file(Network, path)


def link(named: str | Network | None, bandwidth: str | None, rtt: str | None) -> Network | None:
    """Return the network `named` (default: lan), with bandwidth and RTT replaced if given; None if all are None.

    `bandwidth` and `rtt` are texts with units, such as `1Gbps` and `4ms`. A UserError is raised as by `load_network`,
    and for text without a unit, a bandwidth that is not positive or an RTT below 0.
    """
    if (named, bandwidth, rtt) == (None, None, None):
        return None
    network = load_network(named)
    if bandwidth is None and rtt is None:
        return network
    bits_per_s = network.bandwidth_bits_per_s if bandwidth is None else parse_bits_per_s(bandwidth, "--bandwidth")
    rtt_s = network.rtt_s if rtt is None else parse_delay(rtt, "--rtt")
    words = [] if bandwidth is not None and rtt is not None and named is None else [network.name]
    name = " ".join([*words, *(word.strip() for word in (bandwidth, rtt) if word is not None)])
    source = f"the command line, over {network.name}"
    return replace(network, name=name, bandwidth_bits_per_s=bits_per_s, rtt_s=rtt_s, source=source)


def network_s(network: Network, *, rounds: float, waited_bytes: float, pair_bytes: float) -> float:
    """Return the seconds that communication takes on a network.

    rounds: messages on the critical path. waited_bytes: bytes on the critical path if links are full-duplex.
    pair_bytes: bytes that a pair of parties send each other, averaged over pairs; used for half-duplex links only.
    """
    num_bytes = waited_bytes if network.duplex == "full" else max(waited_bytes, pair_bytes)
    return num_bytes * 8 / network.bandwidth_bits_per_s + rounds * network.rtt_s / 2
