"""Published runs of models under CKKS on GPUs: fits of a GPU's testbed, and predictions of runs that were held out.

A run's seconds are its bootstraps times a mean, plus all else. On each card, both are the least squares of the fitted
rows. The mean scales the bootstraps of Perseus's planner, by slots, if the card has no table of its own; all else scales
the primitives of ANT-ACE's CPU, so that GPT-2 small, a token, has as many seconds here.

Sources: README of Perseus (GPT-2 small on one RTX PRO 6000, 32-bit words, and its planner's table of bootstraps); README
of HEAT, arXiv 2609.01730 (GPT-2 small, A100 of 64 GB); MOAI, https://eprint.iacr.org/2025/991 (BERT-base, A100).
"""

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from costmodel import ops
from costmodel.calibration.printed_figures import PrintedFigure, PrintedRow
from costmodel.ops import Node
from costmodel.protocols import ckks
from costmodel.protocols.ckks import CARDS, TESTBEDS, CkksTestbed

ROWS = TESTBEDS / "ckks_rows.csv"
PLANNED_SLOTS, PLANNED_S = (1, 512, 32768), (0.0160, 0.0187, 0.0288)  # Perseus's planner, 32-bit words
PLANNED_ON = "rtx-pro-6000"
HELD_OUT_BAR = 0.15
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

    def seconds(self, bootstraps: int) -> float:
        return bootstraps * self.bootstrap_s + self.rest_s


def ckks_rows(path: Path = ROWS) -> tuple[CkksRow, ...]:
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(CkksRow(**record | {"bootstraps": int(record["bootstraps"])}) for record in csv.DictReader(file))


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


def fitted_testbed(machine: str, gpt2: Iterable[Node]) -> CkksTestbed:
    """Return the testbed of a card; `gpt2` are the ops of GPT-2 small for one token."""
    rows = ckks_rows()
    found, planned = fit(machine, rows), fit(PLANNED_ON, rows)
    cpu = ckks.load(testbed=Path("ant-ace-cpu"))
    placed = cpu.placed(gpt2)
    cpu_s = sum(map(cpu.testbed.step_s, placed.steps, placed.placement.levels))
    scale, slower = found.rest_s / cpu_s, found.bootstrap_s / planned.bootstrap_s
    return replace(
        cpu.testbed,
        machine=f"one GPU, {machine}; published, not measured here",
        source=f"bootstraps of {rows[0].source} x {slower:.3g}, primitives of ANT-ACE's CPU x {scale:.3g}; ckks_rows.csv",
        primitives={
            name: tuple(float(f"{seconds * scale:.4g}") for seconds in values)
            for name, values in cpu.testbed.primitives.items()
        },
        at_slots=PLANNED_SLOTS,
        bootstrap_s=tuple(float(f"{seconds * slower:.4g}") for seconds in PLANNED_S),
        error=float(f"{found.error:.4g}"),
    )


def compared_rows() -> list[PrintedRow]:
    """Return every published run beside its prediction, and MOAI's parts beside those of its dimensions here."""
    rows = ckks_rows()
    results = []
    for row in rows:
        seconds = fit(row.machine, rows).seconds(row.bootstraps)
        figure = PrintedFigure(printed=row.seconds, ours=seconds, bar=HELD_OUT_BAR)
        results.append(PrintedRow(name=row.name, use=row.use, figures={"seconds": figure}))
    pricer = ckks.load("loopback", TESTBEDS / CARDS["a100"])
    nodes = bert_base()
    placed, prices = pricer.placed(nodes), pricer.prices(nodes)
    total_s = sum(price.latency_s for price in prices)
    computed_s = sum(map(pricer.testbed.step_s, placed.steps, placed.placement.levels))
    rotations: Counter[str] = Counter()
    for step in placed.steps:
        if step.node.op.is_product:
            rotations.update({name: count for (name, _), count in step.work.items()})
    ours = {"seconds": total_s, "share of bootstraps": 1 - computed_s / total_s, "rotations": rotations["rotation"]}
    figures = {what: PrintedFigure(printed=text, ours=ours[what], bar=None) for what, text in MOAI.items()}
    return [*results, PrintedRow(name="MOAI, BERT-base T=128, a100", use="held out, explained", figures=figures)]


def bert_base() -> tuple[Node, ...]:
    """The blocks of BERT-base for 128 tokens, with causal attention, which takes as many products."""
    rows, width, inner, heads = 128, 768, 3072, 12
    size, square = {"rows": rows, "features": width}, {"heads": heads, "queries": rows, "keys": rows}
    nodes: list[Node] = []

    def add(op: ops.Op, *inputs: str) -> str:
        layer = len(nodes) // 14
        nodes.append(Node(name=f"layers.{layer}.{len(nodes)}", layer=layer, op=op, inputs=inputs))
        return nodes[-1].name

    def linear(source: str, in_features: int, out_features: int) -> str:
        return add(ops.Linear(rows=rows, in_features=in_features, out_features=out_features, bias=True), source)

    stream = "hidden"
    for _ in range(12):
        parts = [linear(stream, width, width) for _ in range(3)]
        packed = add(ops.PackHeads(rows=rows, query_features=width, key_features=width), *parts)
        scores = add(ops.AttentionScores(**square, head_dim=width // heads), packed)
        mixed = add(ops.AttentionMix(**square, head_dim=width // heads), add(ops.Softmax(**square), scores), packed)
        stream = add(ops.LayerNorm(**size), add(ops.Add(**size), stream, linear(mixed, width, width)))
        hidden = add(ops.Gelu(rows=rows, features=inner, form="exact"), linear(stream, width, inner))
        stream = add(ops.LayerNorm(**size), add(ops.Add(**size), stream, linear(hidden, inner, width)))
    return tuple(nodes)
