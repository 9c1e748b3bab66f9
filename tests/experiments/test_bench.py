"""The bench of training and pricing, small."""

from dataclasses import replace

import pytest
from rich.console import Console

from costmodel.errors import UserError
from experiments import bench
from experiments.__main__ import settings_of

SMALL = replace(settings_of("bench"), base="tiny", scale="smoke", rounds=1, burst_s=0.1, protocols=("published",))


@pytest.mark.parametrize("way", [bench.PLAIN, bench.OURS, bench.REGULARISED])
def test_a_step_learns(way: str) -> None:
    step, tokens = bench.stepper(SMALL, way)
    assert step() > [step() for _ in range(10)][-1]
    assert tokens > 0


def test_every_way_has_a_rate_and_every_protocol_its_seconds() -> None:
    console = Console(width=120, record=True)
    bench.run("bench", SMALL, console)
    text = console.export_text()
    assert all(name in text for name in (bench.PLAIN, bench.OURS, bench.REGULARISED, "published"))


def test_no_rounds_are_refused() -> None:
    with pytest.raises(UserError, match="`rounds` must be positive, but got 0"):
        replace(SMALL, rounds=0)
