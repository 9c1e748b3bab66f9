"""Whom a price trusts, and what it costs to trust no dealer, for people (a table) and programs (JSON)."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from costmodel.randomness.makers import Made
from costmodel.trust.adversary import Trust, facts

MADE_TITLE = "without that dealer, by formulas that were not measured here, computing not counted:"


def trust_document(trust: Trust, made: Sequence[Made] = ()) -> dict[str, Any]:
    """The statement as JSON data; alternatives to a dealer are by formula, so `measured` is false."""
    return {
        **facts(trust),
        "alternatives": [
            {
                "randomness": one.maker.name,
                "trusts": one.maker.trusts,
                "setup_bytes": one.setup_bytes,
                "network_s": one.network_s,
                "measured": False,
                "source": one.maker.source,
            }
            for one in made
        ],
    }


def made_table(made: Sequence[Made]) -> Table:
    """What the dealer's part would take if it were made otherwise."""
    table = Table(box=None, pad_edge=False, title=MADE_TITLE, title_justify="left", title_style="")
    table.add_column("correlated randomness by", no_wrap=True)
    table.add_column("trusting", no_wrap=True)
    table.add_column("sent ahead", justify="right")
    table.add_column("on the network", justify="right")
    for one in made:
        sent, seconds = format_bytes(one.setup_bytes), format_seconds(one.network_s)
        table.add_row(one.maker.name, one.maker.trusts, sent, seconds)
    return table
