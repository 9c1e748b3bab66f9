from dataclasses import replace

import pytest

from costmodel.protocols import PROTOCOLS, TRUST, load_pricer
from costmodel.trust import caption, described, shown


def test_every_protocol_has_a_statement():
    assert set(TRUST) == set(PROTOCOLS)
    for protocol in PROTOCOLS:
        assert load_pricer(protocol).trust == TRUST[protocol]


def test_thresholds_by_name():
    three = TRUST["aby3"]
    assert three.threshold == "honest majority"
    assert replace(three, max_corrupted=2).threshold == "dishonest majority"
    assert TRUST["semi2k"].threshold == "dishonest majority"


def test_in_words():
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
    """What the statement of semi2k says, in the configuration that runs are made with."""
    from spu import libspu

    from costmodel.engine.runtimes import configuration
    from costmodel.protocols.primitives import EngineSetting

    assert configuration("semi2k", EngineSetting()).beaver_type == libspu.RuntimeConfig.BeaverType.TrustedFirstParty
    assert "first party" in TRUST["semi2k"].randomness
