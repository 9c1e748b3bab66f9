import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.network import NETWORKS, Network, link, load_network, network_s

LINK = Network(name="link", bandwidth_bits_per_s=8e6, rtt_s=0.1, source="a test")


def test_bytes_take_bandwidth_and_rounds_half_a_round_trip() -> None:
    assert network_s(LINK, rounds=4, waited_bytes=1e6, pair_bytes=2e6) == pytest.approx(1.0 + 4 * 0.05)


def test_half_duplex_shares_the_bandwidth_between_directions() -> None:
    half = Network(name="half", bandwidth_bits_per_s=8e6, rtt_s=0.0, duplex="half", source="a test")
    assert network_s(half, rounds=4, waited_bytes=1e6, pair_bytes=2e6) == pytest.approx(2.0)


def test_loopback_costs_nothing_beyond_computing() -> None:
    assert network_s(NETWORKS["loopback"], rounds=1000, waited_bytes=1e12, pair_bytes=1e12) == 0.0


@given(
    first=st.floats(1e3, 1e12),
    second=st.floats(1e3, 1e12),
    rounds=st.integers(0, 10**6),
    num_bytes=st.floats(0, 1e13),
)
def test_more_bandwidth_is_never_slower(first: float, second: float, rounds: int, num_bytes: float) -> None:
    slow, fast = sorted((first, second))
    seconds = [
        network_s(
            Network(name="n", bandwidth_bits_per_s=bandwidth, rtt_s=0.01, source="a test"),
            rounds=rounds,
            waited_bytes=num_bytes,
            pair_bytes=num_bytes,
        )
        for bandwidth in (slow, fast)
    ]
    assert seconds[1] <= seconds[0]


def test_a_file_holds_a_network(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{name: mine, bandwidth_bits_per_s: 1.0e+8, rtt_s: 0.02, duplex: half, source: measured}")
    assert load_network(str(path)).duplex == "half"


def test_flags_change_a_named_link() -> None:
    assert link(None, None, None) is None
    assert link("wan", None, None) == NETWORKS["wan"]
    both = link(None, "1Gbps", "4ms")
    assert both is not None
    assert (both.name, both.bandwidth_bits_per_s, both.rtt_s) == ("1Gbps 4ms", 1e9, 0.004)
    one = link("wan", None, "4ms")
    assert one is not None
    assert (one.name, one.bandwidth_bits_per_s, one.rtt_s) == ("wan 4ms", 352e6, 0.004)
    other = link(None, "10Gbps", None)
    assert other is not None
    assert (other.name, other.bandwidth_bits_per_s, other.rtt_s) == ("lan 10Gbps", 1e10, 0.5e-3)
    with pytest.raises(ValueError, match="--bandwidth must be a positive number"):
        link(None, "", None)


def test_presets_are_filed_under_their_names() -> None:
    assert all(load_network(name).name == name and network.source for name, network in NETWORKS.items())


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("moon", "network must be one of loopback, lan, wan.*but got 'moon'"),
        ("none.yaml", "must be an existing file with the keys name, bandwidth_bits_per_s"),
    ],
)
def test_unknown_networks_are_refused(name: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        load_network(name)


@pytest.mark.parametrize(
    "wrong", [{"bandwidth_bits_per_s": 0.0}, {"bandwidth_bits_per_s": math.nan}, {"rtt_s": -1.0}, {"rtt_s": math.inf}]
)
def test_impossible_links_are_refused(wrong: dict[str, float]) -> None:
    settings: Any = {"bandwidth_bits_per_s": 1e9, "rtt_s": 0.0} | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Network(name="link", source="a test", **settings)
