import pytest

from costmodel.protocols import published
from costmodel.protocols.published import Constant, load_testbed


def test_every_constant_says_what_identifies_it():
    testbed = load_testbed(published.TESTBED)
    for constants in (testbed.sent_bytes, testbed.latency_s):
        assert constants.keys() == published.TERMS.keys()
        for constant in constants.values():
            assert constant.value > 0
            assert constant.source
    assert {term for term, constant in testbed.latency_s.items() if constant.identified_by == "prior"} == {
        "relu_elements"
    }
    assert testbed.not_identified


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": -1.0}, "finite and at least 0, but got -1.0"),
        ({"value": float("nan")}, "finite and at least 0, but got nan"),
        ({"low": 0.5}, "neither if data do"),
        ({"identified_by": "prior"}, "needs `low` and `high`"),
        ({"identified_by": "prior", "low": 2.0, "high": 3.0}, "between `low` and `high`, but got 2.0, 1.0, 3.0"),
    ],
)
def test_impossible_constants_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Constant(**{"value": 1.0, "identified_by": "data", "source": "a test", **changes})


def test_bounds_of_a_constant():
    assert Constant(value=1.0, identified_by="data", source="").bounds == (0.0, float("inf"))
    assert Constant(value=1.0, identified_by="prior", source="", low=0.5, high=2.0).bounds == (0.5, 2.0)
