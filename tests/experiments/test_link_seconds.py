"""Settings of the experiment; that it needs a link of its own leaves its run to those who may make one."""

from typing import Any

import pytest

from costmodel.errors import UserError
from experiments.__main__ import settings_of


def test_the_committed_settings_are_read() -> None:
    assert [link.bandwidth_bits_per_s for link in settings_of("link-seconds").links] == [50e6, 200e6, 200e6]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repeats": 0}, "`repeats` must be at least 1, but got 0"),
        ({"links": [{"delay_s": 0.1}]}, "needs a `bandwidth_bits_per_s`"),
        ({"links": [{"bandwidth_bits_per_s": -1.0}]}, "must be positive and finite, but got -1"),
        ({"scale": "proxy"}, "scale"),
    ],
)
def test_bad_settings_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings_of("link-seconds", **change)
