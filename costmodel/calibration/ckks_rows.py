"""Published runs of models under CKKS on GPUs: fits of a GPU's testbed, and predictions of runs that were held out.

A run's seconds are its bootstraps times a mean, plus all else. On each card, both are the least squares of the fitted
rows. The mean scales the bootstraps of Perseus's planner, by slots; all else scales the primitives of ANT-ACE's CPU, so
that GPT-2 small, a token, has as many seconds here.

Sources: README of Perseus (GPT-2 small on one RTX PRO 6000, 32-bit words; its planner's table of bootstraps); README of
HEAT, arXiv 2609.01730 (GPT-2 small, A100 of 64 GB); MOAI, https://eprint.iacr.org/2025/991 (BERT-base, A100).
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from costmodel.calibration.printed_figures import PrintedFigure, PrintedRow
from costmodel.ops import Node
from costmodel.protocols import ckks
from costmodel.protocols.ckks import TESTBEDS, CkksTestbed

ROWS = TESTBEDS / "ckks_rows.csv"
PLANNED_SLOTS, PLANNED_S = (1, 512, 32768), (0.0160, 0.0187, 0.0288)  # Perseus's planner, 32-bit words
PLANNED_ON = "rtx-pro-6000"
BAR = 0.15
# MOAI's seconds for 128 tokens, whole and in bootstraps, and rotations of its matrix products
MOAI = {"seconds": "283.95", "share of bootstraps": "0.8024", "rotations": "9648"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CkksRow:
    """A published run: a plan's bootstraps, and seconds as printed."""

    source: str
    model: str
    machine: str
    use: str
    bootstraps: int
    seconds: str

    @property
    def name(self) -> str:
        return f"{self.source}, {self.model}, {self.machine}, {self.bootstraps} bootstraps"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Seconds of a bootstrap, and of all else.

    error: the greatest on a row that is left out of the fit; Perseus's for a card with no row to leave out.
    """

    bootstrap_s: float
    rest_s: float
    error: float

    def seconds(self, row: CkksRow) -> float:
        return row.bootstraps * self.bootstrap_s + self.rest_s


def ckks_rows(path: Path = ROWS) -> tuple[CkksRow, ...]:
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(CkksRow(bootstraps=int(record.pop("bootstraps")), **record) for record in csv.DictReader(file))


def fit(machine: str, rows: Iterable[CkksRow]) -> Fit:
    """Return the least squares of a card's fitted rows."""
    mine = [row for row in rows if row.machine == machine and row.use == "fitted"]
    slope, rest = _line(mine)
    if len(mine) == 2:  # a line through two rows says nothing of its error
        return Fit(bootstrap_s=slope, rest_s=rest, error=fit(PLANNED_ON, ckks_rows()).error)
    errors = []
    for row in mine:
        without, at_none = _line([other for other in mine if other is not row])
        errors.append(abs((without * row.bootstraps + at_none) / float(row.seconds) - 1))
    return Fit(bootstrap_s=slope, rest_s=rest, error=max(errors))


def _line(rows: Sequence[CkksRow]) -> tuple[float, float]:
    slope, rest = np.polyfit([row.bootstraps for row in rows], [float(row.seconds) for row in rows], 1)
    return float(slope), float(rest)


def fitted_testbed(machine: str, gpt2: Sequence[Node]) -> CkksTestbed:
    """Return the testbed of a card; `gpt2` are the ops of GPT-2 small for one token."""
    rows, cpu = ckks_rows(), ckks.load(testbed=Path("ant-ace-cpu"))
    found, planned = fit(machine, rows), fit(PLANNED_ON, rows)
    seconds = cpu.placed(gpt2).seconds(cpu.testbed)
    scale, slower = (
        found.rest_s / (sum(seconds.values()) - seconds["bootstrap"]),
        found.bootstrap_s / planned.bootstrap_s,
    )
    primitives = cpu.testbed.primitives.items()
    return replace(
        cpu.testbed,
        machine=f"one GPU, {machine}; published, not measured here",
        source=f"Perseus's bootstraps x {slower:.3g}, primitives of ANT-ACE's CPU x {scale:.3g}; ckks_rows.csv",
        primitives={name: tuple(float(f"{one * scale:.4g}") for one in values) for name, values in primitives},
        at_slots=PLANNED_SLOTS,
        bootstrap_s=tuple(float(f"{one * slower:.4g}") for one in PLANNED_S),
        error=float(f"{found.error:.4g}"),
    )


def compared_rows(blocks: Sequence[Node]) -> list[PrintedRow]:
    """Return every published run beside its prediction, and MOAI's parts beside ours; `blocks` are BERT-base's."""
    rows = ckks_rows()
    figures = [PrintedFigure(printed=row.seconds, ours=fit(row.machine, rows).seconds(row), bar=BAR) for row in rows]
    results = [
        PrintedRow(name=row.name, use=row.use, figures={"seconds": figure})
        for row, figure in zip(rows, figures, strict=True)
    ]
    pricer = ckks.load("loopback", Path("a100"))
    placed = pricer.placed(blocks)
    seconds = placed.seconds(pricer.testbed)
    rotations = sum(
        count
        for step in placed.steps
        for (name, _), count in step.work.items()
        if step.node.op.is_product and name == "rotation"
    )
    ours = {
        "seconds": sum(seconds.values()),
        "share of bootstraps": seconds["bootstrap"] / sum(seconds.values()),
        "rotations": rotations,
    }
    moai = {what: PrintedFigure(printed=text, ours=ours[what]) for what, text in MOAI.items()}
    return [*results, PrintedRow(name="MOAI, BERT-base T=128, a100", use="explained", figures=moai)]
