"""The rows the papers print: what each architecture cost, as data.

Every number is as printed, units of the papers included (GFLOP, GB of 1e9 bytes, minutes), because a fit is judged
against printed digits.

Source: arXiv 2410.13060 (AERO) table 3 and arXiv 2501.03489 (EGA) table 2; each row names its own.
"""

import csv
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import get_type_hints

from costmodel.config.units import BYTES, SECONDS

TESTBEDS = Path(__file__).parents[1] / "testbeds"
ROWS = TESTBEDS / "published_rows.csv"
HELD_OUT = TESTBEDS / "held_out_rows.csv"  # of 512 tokens: never fitted, so that they say what a price is worth


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRow:
    """One printed row; Decimal keeps the printed digits.

    sent_gigabytes: total communication; the papers do not say whether of one party or of both.
    ffn_gflop, attention_gflop: the papers' own counting convention.
    perplexity: None where training diverged (printed NaN).
    held_out: whether no fit may see it.
    """

    source: str
    notation: str
    dataset: str
    num_layers: int
    num_heads: int
    d_model: int
    vocab_size: int
    seq_len: int
    ffn_gflop: Decimal
    attention_gflop: Decimal
    sent_gigabytes: Decimal
    latency_min: Decimal
    perplexity: float | None
    held_out: bool = False

    @property
    def name(self) -> str:
        return f"{self.notation} L={self.num_layers} T={self.seq_len}"

    @property
    def own_method(self) -> bool:
        """Whether the row is the papers' own architecture, not He and Hofmann's block that they compare with."""
        return not self.notation.startswith("HH(")

    @property
    def sent_bytes(self) -> float:
        return float(self.sent_gigabytes * Decimal(BYTES["GB"]))

    @property
    def latency_s(self) -> float:
        return float(self.latency_min * Decimal(SECONDS["min"]))


_KINDS = get_type_hints(PublishedRow)


def published_rows(path: Path = ROWS) -> tuple[PublishedRow, ...]:
    """The printed rows, in the order of the papers."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(_row(record) for record in csv.DictReader(file))


def held_out_rows() -> tuple[PublishedRow, ...]:
    """The printed rows that are for checking alone."""
    return tuple(replace(row, held_out=True) for row in published_rows(HELD_OUT))


def _row(record: dict[str, str]) -> PublishedRow:
    perplexity = record.pop("perplexity")
    values = {name: _KINDS[name](text) for name, text in record.items()}
    return PublishedRow(**values, perplexity=None if perplexity == "NaN" else float(perplexity))
