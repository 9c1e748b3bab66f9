"""Tests of protocols of the user's own, `module:Class`; docs/extending.md has one that its test runs."""

import sys

import pytest

from costmodel.errors import UserError
from costmodel.ops import Relu
from costmodel.protocols import load_pricer, setting_of

OWN = """
from dataclasses import dataclass
from pathlib import Path

from costmodel.protocols.derived import ByFormula
from costmodel.protocols.primitives import Comm
from costmodel.protocols.published import TRUST


@dataclass(frozen=True, kw_only=True, slots=True)
class Own(ByFormula):
    testbed: Path | None = None

    @property
    def trust(self):
        return TRUST

    def comm(self, op):
        sent = 16 * op.rows * op.features
        return Comm(rounds=1, messages=2, online_bytes=sent, waited_bytes=sent / 2)

    def op_s(self, op, cost):
        return 0.25 if self.testbed is None else float(self.testbed.read_text())


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds(Own):
    seconds: float


class Unfinished(ByFormula):
    pass


def function():
    pass
"""
OP = Relu(rows=4, features=8)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes the module, and makes it importable."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_protocol", raising=False)
    (path := tmp_path / "own_protocol.py").write_text(OWN)
    return path


def test_a_class_of_ones_own_prices_on_its_network_and_testbed(module, tmp_path):
    pricer, far = (load_pricer("own_protocol:Own", network) for network in (None, "wan"))
    price = pricer.price(OP)
    assert (pricer.protocol, pricer.network, far.network) == ("own_protocol:Own", "lan", "wan")
    assert (price.sent_bytes, price.rounds, price.compute_s) == (16 * 32, 1, 0.25)
    assert far.price(OP).latency_s > price.latency_s
    (testbed := tmp_path / "mine.yaml").write_text("2.0")
    measured = load_pricer("own_protocol:Own", testbed=testbed)
    assert measured.price(OP).compute_s == 2.0
    module.write_text(f"{OWN}\n# another formula")
    changed = load_pricer("own_protocol:Own")
    assert len({one.cost_model_id for one in (pricer, far, measured, changed)}) == 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("own", {}, "must be one of published, .*, or module:Class of your own, but got 'own'"),
        ("no_such_module:Own", {}, "'no_such_module:Own' cannot be loaded: No module named"),
        ("own_protocol:Other", {}, "cannot be loaded: .* has no attribute 'Other'"),
        (":Own", {}, "':Own' cannot be loaded: Empty module name"),
        ("own_protocol:function", {}, "must be a subclass of costmodel.protocols.derived.ByFormula"),
        ("own_protocol:Unfinished", {}, "cannot be made: .*abstract"),
        ("own_protocol:Seconds", {}, "cannot be made: .*'seconds'"),
        ("own_protocol:Own", {"network": "moon"}, "moon"),
        ("own_protocol:Own", {"testbed": "no.yaml"}, "no.yaml cannot be read"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(module, name, options, message):
    with pytest.raises(UserError, match=message):
        load_pricer(name, **options)


def test_a_setting_or_testbed_that_a_class_does_not_have_is_refused(module):
    with pytest.raises(UserError, match="takes no --weights, but got --weights server"):
        setting_of("own_protocol:Own", weights="server")
    module.write_text(OWN.replace("    testbed: Path | None = None\n", "").replace("self.testbed is None", "True"))
    with pytest.raises(UserError, match="has no field `testbed`, but got --testbed mine.yaml"):
        load_pricer("own_protocol:Own", testbed="mine.yaml")
