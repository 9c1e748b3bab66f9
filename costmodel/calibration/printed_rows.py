"""Bytes that other papers print for whole models, beside those of the formulas here, which were never fitted on them.

In each group of rows, the row marked `fitted` gives one factor between the group's way of counting and ours; the other
rows are held out. We price 12 blocks of GPT-2's size, with separate linears for queries, keys and values, the piecewise
GELU, and the norm outside them (BERT's of the embedding, GPT-2's last). The sources run their own functions, and
everything outside the blocks, for GPT-2 a whole new token.

Sources: Dong et al. 2023, PUMA, https://arxiv.org/abs/2307.12533; Lu et al. 2025, BumbleBee,
https://eprint.iacr.org/2023/1678, as quoted by Kei and Chow 2025, SHAFT, NDSS.
"""

import csv
from pathlib import Path

from costmodel import ops
from costmodel.calibration.printed_figures import PrintedFigure, PrintedRow
from costmodel.calibration.sigma_rows import attention_ops, linear
from costmodel.config.units import BYTES
from costmodel.ops import Op
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import EngineSetting, total_comm

ROWS = Path(__file__).parents[1] / "testbeds" / "printed_rows.csv"
LAYERS, HEADS, WIDTH, INNER = 12, 12, 768, 3072


def compared_bytes(protocol: str) -> list[PrintedRow]:
    """Return the printed bytes under a protocol beside ours, times the factor of the fitted row of their group."""
    factors: dict[str, float] = {}
    rows = []
    with ROWS.open(encoding="utf-8", newline="") as file:
        for record in csv.DictReader(file):  # the fitted row of each group comes first
            if record["protocol"] != protocol:
                continue
            some = model_ops(int(record["seq_len"]), causal=record["model"] == "GPT-2")
            gigabytes = total_comm(ENGINE_PROTOCOLS[protocol].walk(some, EngineSetting())).sent_bytes / BYTES["GB"]
            is_fitted = record["fitted"] == "yes"
            if is_fitted:
                factors[record["group"]] = float(record["gigabytes"]) / gigabytes
            factor = factors[record["group"]]
            name = f"{record['group']}: {record['model']} T={record['seq_len']} (factor {factor:.3f})"
            figure = PrintedFigure(printed=record["gigabytes"], ours=gigabytes * factor)
            rows.append(PrintedRow(name=name, use="fitted" if is_fitted else "held out", figures={"GB": figure}))
    return rows


def model_ops(tokens: int, *, causal: bool) -> list[Op]:
    """Return the ops of the model without additions, which are local."""
    norm = ops.LayerNorm(rows=tokens, features=WIDTH)
    query_key_value = [linear(tokens, WIDTH, WIDTH)] * 3
    gelu = ops.Gelu(rows=tokens, features=INNER, form="piecewise")
    ffn = [norm, linear(tokens, WIDTH, INNER), gelu, linear(tokens, INNER, WIDTH)]
    return [norm, *query_key_value, *attention_ops(tokens, HEADS, WIDTH, causal=causal), *ffn] * LAYERS + [norm]
