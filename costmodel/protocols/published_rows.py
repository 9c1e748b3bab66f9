"""The rows that the papers print, as data: what each architecture cost.

Every number is as printed, in the papers' units (GFLOP, GB of 1e9 bytes, minutes).

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
HELD_OUT = TESTBEDS / "held_out_rows.csv"  # 512 tokens: never fitted, so they check the fit


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRow:
    """One printed row; Decimal keeps the printed digits.

    Attributes:
        sent_gigabytes: Total communication. The papers do not say whether it counts one party or both.
        ffn_gflop, attention_gflop: By the papers' own counting convention.
        perplexity: None where training diverged (printed as NaN).
        held_out: Whether the row is kept out of every fit.
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
        """Whether the row is an architecture of the papers, not the block of He and Hofmann that they compare with."""
        return not self.notation.startswith("HH(")

    @property
    def sent_bytes(self) -> float:
        return float(self.sent_gigabytes * Decimal(BYTES["GB"]))

    @property
    def latency_s(self) -> float:
        return float(self.latency_min * Decimal(SECONDS["min"]))


_KINDS = get_type_hints(PublishedRow)


def published_rows(path: Path = ROWS) -> tuple[PublishedRow, ...]:
    """Read the printed rows, in the order of the papers."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(_row(record) for record in csv.DictReader(file))


def held_out_rows() -> tuple[PublishedRow, ...]:
    """Read the printed rows that are only used for checking."""
    return tuple(replace(row, held_out=True) for row in published_rows(HELD_OUT))


def _row(record: dict[str, str]) -> PublishedRow:
    perplexity = record.pop("perplexity")
    values = {name: _KINDS[name](text) for name, text in record.items()}
    return PublishedRow(**values, perplexity=None if perplexity == "NaN" else float(perplexity))
