from collections.abc import Callable

import pytest
from rich.console import Console

from costmodel.errors import StoppedError
from experiments import pricing
from experiments.__main__ import settings_of
from experiments.pricing import price_many
from search_spaces.space import load_space

EASY = {"least_architectures_per_s": 1.0, "most_estimate_s": 1e3, "most_import_s": 1e3}
SMALL = EASY | {"space": "tiny", "seq_len": 8, "rows": 2000, "repeats": 1, "protocols": ["published", "semi2k"]}


def test_every_figure_is_printed_with_its_verdict() -> None:
    console = Console(record=True, width=120)
    pricing.run("pricing", settings_of("pricing", **SMALL), console)
    text = console.export_text()
    assert text.count("PASS") == 6
    assert "semi2k: architectures/s" in text


def test_a_missed_bar_is_said_and_stops() -> None:
    console = Console(record=True, width=120)
    with pytest.raises(StoppedError, match="of 6 bars are missed: import costmodel, above bare Python"):
        pricing.run("pricing", settings_of("pricing", **SMALL | {"most_import_s": 0.0}), console)
    assert "FAIL" in console.export_text()


def one_more_byte(*args):
    prices = price_many(*args)
    return prices | {"sent_bytes": prices["sent_bytes"] + 1}


@pytest.mark.parametrize(
    ("name", "broken"),
    [("deployed", lambda architecture: architecture), ("price_many", one_more_byte)],
    ids=["priced as written", "one more byte"],
)
def test_rows_that_disagree_with_the_op_graph_of_what_is_deployed_are_refused(
    name: str, broken: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the op graphs of members as written, the first row with something to fold would be refused."""
    settings = settings_of("pricing", **SMALL)
    assert pricing.vectorised(settings, load_space("tiny"), "semi2k").verdict == "PASS"
    monkeypatch.setattr(pricing, name, broken)
    with pytest.raises(ValueError, match="must send its op graph's .* bytes, but is priced"):
        pricing.vectorised(settings, load_space("tiny"), "semi2k")
