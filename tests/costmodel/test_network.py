import math
from dataclasses import replace
from typing import Any

import pytest

from costmodel.network import NETWORKS, Network, link, load_network, network_s
from costmodel.protocols import PROTOCOLS, TRUST, load_pricer
from costmodel.trust import caption, described, shown

LINK = Network(name="link", bandwidth_bits_per_s=8e6, rtt_s=0.1, source="a test")


@pytest.mark.parametrize(
    ("network", "seconds"),
    [(LINK, 1.0 + 4 * 0.05), (replace(LINK, duplex="half"), 2.0 + 4 * 0.05), (NETWORKS["loopback"], 0.0)],
)
def test_bytes_take_bandwidth_which_half_duplex_shares_and_rounds_half_a_round_trip(network, seconds):
    assert network_s(network, rounds=4, waited_bytes=1e6, pair_bytes=2e6) == pytest.approx(seconds)


def test_a_network_is_in_a_file_or_a_preset(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("{name: mine, bandwidth_bits_per_s: 1.0e+8, rtt_s: 0.02, duplex: half, source: measured}")
    assert load_network(str(path)).duplex == "half"
    assert all(load_network(name).name == name and network.source for name, network in NETWORKS.items())


def test_flags_change_a_named_link():
    assert link(None, None, None) is None
    assert link("wan", None, None) == NETWORKS["wan"]
    for flags, numbers in {
        (None, "1Gbps", "4ms"): ("1Gbps 4ms", 1e9, 0.004),
        ("wan", None, "4ms"): ("wan 4ms", 352e6, 0.004),
        (None, "10Gbps", None): ("lan 10Gbps", 1e10, 0.5e-3),
    }.items():
        changed = link(*flags)
        assert (changed.name, changed.bandwidth_bits_per_s, changed.rtt_s) == numbers
    with pytest.raises(ValueError, match="--bandwidth must be a positive number"):
        link(None, "", None)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("moon", "network must be one of loopback, lan, wan.*but got 'moon'"),
        ("none.yaml", "must be an existing file with the keys name, bandwidth_bits_per_s"),
    ],
)
def test_unknown_networks_are_refused(name, error):
    with pytest.raises(ValueError, match=error):
        load_network(name)


@pytest.mark.parametrize(
    "wrong", [{"bandwidth_bits_per_s": 0.0}, {"bandwidth_bits_per_s": math.nan}, {"rtt_s": -1.0}, {"rtt_s": math.inf}]
)
def test_impossible_links_are_refused(wrong):
    settings: Any = {"bandwidth_bits_per_s": 1e9, "rtt_s": 0.0} | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Network(name="link", source="a test", **settings)


def test_every_protocol_has_a_statement_in_words():
    assert set(TRUST) == set(PROTOCOLS)
    for protocol in PROTOCOLS:
        assert load_pricer(protocol).trust == TRUST[protocol]
    three = TRUST["aby3"]
    assert three.threshold == "honest majority"
    assert replace(three, max_corrupted=2).threshold == "dishonest majority"
    assert TRUST["semi2k"].threshold == "dishonest majority"
    assert described(TRUST["aby3"]) == (
        "3 parties, semi-honest, honest majority (at most 1 corrupted); correlated randomness: none but seeds that "
        "pairs of parties share"
    )
    assert shown("0-5").startswith(
        "; public layers 0-5: every party has their weights, and none sees more by it of the"
    )
    assert shown(None) == ""
    assert caption(TRUST["semi2k"]) == "2 parties, semi-honest, dishonest majority, trusted dealer"


@pytest.mark.needs_engine
def test_the_engine_deals_from_its_first_party():
    from spu import libspu

    from costmodel.engine.spu_runtime import configuration
    from costmodel.protocols.primitives import EngineSetting

    assert configuration("semi2k", EngineSetting()).beaver_type == libspu.RuntimeConfig.BeaverType.TrustedFirstParty
    assert "first party" in TRUST["semi2k"].randomness
