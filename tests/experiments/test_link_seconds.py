"""Settings of the experiment; that it needs a link of its own leaves its run to those who may make one."""

from typing import Any

import pytest

from costmodel.config.schema import decode
from costmodel.config.strict_yaml import load_mapping
from costmodel.errors import UserError
from experiments.__main__ import definitions
from experiments.link_seconds import Settings


def committed() -> dict[str, Any]:
    data = load_mapping(definitions()["link-seconds"])
    del data["kind"]
    return data


def test_the_committed_settings_are_read() -> None:
    settings = decode(Settings, committed(), "link-seconds")
    assert [link.bandwidth_bits_per_s for link in settings.links] == [50e6, 200e6, 200e6]


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
        decode(Settings, committed() | change, "link-seconds")
