from dataclasses import replace

import pytest
from rich.console import Console

from costmodel.cost import Price
from costmodel.errors import UserError
from experiments import protocols
from experiments.__main__ import settings_of
from experiments.protocols import losses_of, picks_within
from nas.searchers.strategy import Trained
from search_spaces.notation import parse
from search_spaces.space import load_space


def trained(*nats: float) -> list[Trained]:
    member = parse("SM+R", load_space("tiny").base)
    return [Trained(member=member, latency_s=0.0, log_perplexity=over) for over in nats]


def prices(*latency_s: float) -> list[Price]:
    return [Price(latency_s=seconds, sent_bytes=1.0) for seconds in latency_s]


def test_a_pick_is_the_cheapest_that_is_good_enough_and_loses_elsewhere() -> None:
    """Under a the second is cheapest, under b the first: it costs 3 / 2 there; the third is cheap and too bad."""
    known, priced = trained(0.1, 0.2, 0.9), {"a": prices(3.0, 2.0, 1.0), "b": prices(4.0, 5.0, 1.0)}
    picks = picks_within(known, priced, 0.2)
    assert picks == {"a": 1, "b": 0}
    assert losses_of(picks, priced) == {"a": [0.0, 0.25], "b": [0.5, 0.0]}
    with pytest.raises(UserError, match="none is within 0.05; raise it"):
        picks_within(known, priced, 0.05)


def test_the_shipped_trainings_are_priced_under_every_setting() -> None:
    settings = settings_of("protocols")
    assert {setting.protocol for setting in settings.settings} >= {"semi2k", "aby3", "cheetah", "sigma"}
    console = Console(record=True, width=200)
    protocols.run("protocols", replace(settings, settings=settings.settings[:1], most_nats=(0.4,)), console)
    text = console.export_text()
    assert "174 trainings, prompt of 128 tokens" in text
    assert "+0.0%" in text
