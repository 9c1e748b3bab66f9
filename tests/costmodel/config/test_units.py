import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.config.units import (
    format_bytes,
    format_count,
    format_seconds,
    parse_bits_per_s,
    parse_bytes,
    parse_delay,
    parse_seconds,
    parse_share,
)


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        *((parse_seconds, *of) for of in (("300s", 300.0), ("5min", 300.0), (" 1.5 h ", 5400.0), ("1e2s", 100.0))),
        *((parse_bytes, *of) for of in (("8GB", 8e9), ("800 MB", 8e8), ("1TB", 1e12), ("12B", 12.0))),
        *((parse_bits_per_s, *of) for of in (("1Gbps", 1e9), ("352 Mbps", 352e6), ("9.6kbps", 9600.0))),
        (parse_seconds, "20ms", 0.02),
        (parse_share, " 60 %", 0.6),
    ],
)
def test_quantities(parse, text, expected):
    assert parse(text, "budget") == pytest.approx(expected)


DURATIONS = ("", "5", "5 parsecs", "-5min", "0s", "nan s", "inf min", "1e999s", "min", "5 GB", "1.2.3s")
BANDWIDTHS = ("0Gbps", "1", "1GBps", "-1Mbps", "inf Gbps", "")


@pytest.mark.parametrize(
    ("parse", "text"), [*((parse_seconds, t) for t in DURATIONS), *((parse_bits_per_s, t) for t in BANDWIDTHS)]
)
def test_a_quantity_is_positive_and_has_a_unit(parse, text):
    with pytest.raises(ValueError, match="--flag must be a positive number with a unit") as error:
        parse(text, "--flag")
    assert repr(text) in str(error.value)


def test_a_share_is_of_a_whole_and_a_delay_may_be_nothing():
    assert parse_share("100%", "--budget-latency") == 1.0
    with pytest.raises(ValueError, match=r"--budget-latency must be at most 100%, all that .* takes, but got '150%'"):
        parse_share("150%", "--budget-latency")
    assert (parse_delay("0ms", "--rtt"), parse_delay("4ms", "--rtt")) == (0.0, 0.004)
    for text in ("-1ms", "nan ms", "4"):
        with pytest.raises(ValueError, match="--rtt must be a number of at least 0 with a unit"):
            parse_delay(text, "--rtt")


@given(st.integers(1, 10**6))
def test_what_is_printed_reads_back(seconds):
    assert parse_seconds(format_seconds(seconds), "x") == pytest.approx(seconds, rel=0.006)


def test_units_for_people():
    assert (format_seconds(285.6), format_seconds(12.34)) == ("4.76 min", "12.3 s")
    assert format_seconds(7200) == "2.00 h"
    assert (format_count(10**14), format_count(5 * 10**400)) == ("100,000,000,000,000", "5.0e400")
    assert (format_bytes(6.43e9), format_bytes(999)) == ("6.43 GB", "999 B")
