"""Published runs of models under CKKS on GPUs, from which the committed testbeds of GPUs are fitted.

A run's seconds are its bootstraps times a mean, plus all else. On each card, both are the least squares of the fitted
rows. The mean scales the bootstraps of Perseus's planner, by slots; all else scales the primitives of ANT-ACE's CPU, so
that GPT-2 small, a token, has as many seconds here.

Sources: README of Perseus (GPT-2 small on one RTX PRO 6000, 32-bit words; its planner's table of bootstraps); README of
HEAT, arXiv 2609.01730 (GPT-2 small, A100 of 64 GB).
"""

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from costmodel.ops import Node
from costmodel.protocols import ckks
from costmodel.protocols.ckks import TESTBEDS, CkksTestbed

PLANNED_SLOTS, PLANNED_S = (1, 512, 32768), (0.0160, 0.0187, 0.0288)  # Perseus's planner, 32-bit words
PLANNED_ON = "rtx-pro-6000"


def ckks_rows() -> list[dict[str, str]]:
    """Return the published runs: source, model, machine, use, a plan's bootstraps and seconds, as printed."""
    with (TESTBEDS / "ckks_rows.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def fit(machine: str, rows: Sequence[dict[str, str]]) -> np.poly1d:
    """Return the seconds of a run by its bootstraps: the least squares of a card's fitted rows."""
    mine = [row for row in rows if (row["machine"], row["use"]) == (machine, "fitted")]
    return np.poly1d(np.polyfit([int(row["bootstraps"]) for row in mine], [float(row["seconds"]) for row in mine], 1))


def fitted_testbed(machine: str, gpt2: Sequence[Node]) -> CkksTestbed:
    """Return the testbed of a card; `gpt2` are the ops of GPT-2 small for one token.

    Its error is the greatest on a row of Perseus that is left out; a line through HEAT's two rows says nothing of it.
    """
    rows, cpu = ckks_rows(), ckks.load(testbed=Path("ant-ace-cpu"))
    (bootstrap_s, rest_s), planned = fit(machine, rows), fit(PLANNED_ON, rows)
    seconds = cpu.testbed.seconds(cpu.placed(gpt2))
    scale, slower = rest_s / (sum(seconds.values()) - seconds["bootstrap"]), bootstrap_s / planned[1]
    left_out = [row for row in rows if (row["machine"], row["use"]) == (PLANNED_ON, "fitted")]
    errors = [
        fit(PLANNED_ON, [other for other in left_out if other is not row])(int(row["bootstraps"]))
        / float(row["seconds"])
        - 1
        for row in left_out
    ]
    primitives = cpu.testbed.primitives.items()
    return replace(
        cpu.testbed,
        machine=f"one GPU, {machine}; published, not measured here",
        source=f"Perseus's bootstraps x {slower:.3g}, primitives of ANT-ACE's CPU x {scale:.3g}; ckks_rows.csv",
        primitives={name: tuple(float(f"{one * scale:.4g}") for one in values) for name, values in primitives},
        at_slots=PLANNED_SLOTS,
        bootstrap_s=tuple(float(f"{one * slower:.4g}") for one in PLANNED_S),
        error=float(f"{max(map(abs, errors)):.4g}"),
    )
