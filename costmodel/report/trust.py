"""Formats whom you must trust, and the cost of avoiding a dealer, as a table and JSON."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from costmodel.config.units import format_bytes, format_seconds
from costmodel.randomness import GeneratorCost
from costmodel.report.tables import table
from costmodel.trust import Trust, facts


def trust_document(trust: Trust, made: Sequence[GeneratorCost] = ()) -> dict[str, Any]:
    """Return the trust as JSON data; alternatives to a dealer are by formula, so `measured` is false."""
    return {
        **facts(trust),
        "alternatives": [
            {
                "randomness": part.generator.name,
                "trusts": part.generator.trusts,
                "setup_bytes": part.setup_bytes,
                "network_s": part.network_s,
                "measured": False,
                "source": part.generator.source,
            }
            for part in made
        ],
    }


def made_table(made: Sequence[GeneratorCost]) -> Table:
    """Tabulate the costs of making the dealer's randomness in other ways."""
    return table(
        ["correlated randomness by", "trusting"],
        ["sent ahead", "on the network"],
        [
            (part.generator.name, part.generator.trusts, format_bytes(part.setup_bytes), format_seconds(part.network_s))
            for part in made
        ],
        title="without that dealer, by formulas that were not measured here, computing not counted:",
    )
