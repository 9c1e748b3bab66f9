import pytest

from costmodel.errors import UserError
from costmodel.protocols.by_protocol import asked_of_each, by_protocol, protocols_of

BOTH = ("semi2k", "sigma")


def test_protocols_are_named_once() -> None:
    assert protocols_of("semi2k, sigma,semi2k") == BOTH


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (None, (None, None)),
        ("5min", ("5min", "5min")),
        ("sigma=2s,semi2k=60s", ("60s", "2s")),
        ("sigma=2s", (None, "2s")),
    ],
)
def test_values_are_of_all_or_of_each(text: str | None, values: tuple[str | None, ...]) -> None:
    assert by_protocol(text, BOTH, "--budget-latency") == dict(zip(BOTH, values, strict=True))


@pytest.mark.parametrize(("text", "part"), [("aby3=2s", "aby3=2s"), ("60s,2s", "60s"), ("sigma=", "sigma=")])
def test_other_protocols_and_values_without_one_are_refused(text: str, part: str) -> None:
    with pytest.raises(UserError, match=rf"--budget-latency must be .* \(semi2k, sigma\), but got '{part}'\."):
        by_protocol(text, BOTH, "--budget-latency")


def test_a_testbed_is_of_one_protocol() -> None:
    with pytest.raises(UserError, match=r"--testbed is of one protocol; say whose, such as semi2k=mine.yaml\."):
        asked_of_each("semi2k,sigma", {"testbed": "mine.yaml"})
    assert asked_of_each("semi2k", {"testbed": "mine.yaml"}) == {"semi2k": {"testbed": "mine.yaml"}}


def test_a_budget_of_keys_is_of_those_that_have_keys() -> None:
    asked = asked_of_each("semi2k,sigma", {"budget_latency": "5s", "budget_keys": "8GB"})
    assert asked == {
        "semi2k": {"budget_latency": "5s", "budget_keys": None},
        "sigma": {"budget_latency": "5s", "budget_keys": "8GB"},
    }
    assert asked_of_each("semi2k", {"budget_keys": "8GB"}) == {"semi2k": {"budget_keys": "8GB"}}
