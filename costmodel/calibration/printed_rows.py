"""Bytes that other papers print for whole models, beside those of the formulas here, which were never fitted on them.

In each group of rows, the row marked `fitted` gives one factor between the group's way of counting and ours; the other
rows are held out. A group without such a row counts as we do, in GiB, and must agree to the last printed digit.

We price 12 blocks of GPT-2's size, with separate linears for queries, keys and values, and the norm outside them
(BERT's of the embedding, GPT-2's last). The sources differ from that as follows:

- CrypTen as run by SIGMA: not at all. GELU is x sigmoid(1.702 x), which sends as much as SiLU.
- SHAFT: CrypTen with its own activation and softmax, which are priced, and the embedding, for GPT-2 also the vocabulary
  projection. BERT's pooler and two more iterations of a norm's root are left out. Its GB are GiB, so the factor alone
  would be 0.931.
- PUMA and BumbleBee: their own functions, and everything outside the blocks, for GPT-2 a whole new token. Their GELU is
  priced as the piecewise one.

Sources: Gupta et al. 2024, SIGMA, https://eprint.iacr.org/2023/1269; Dong et al. 2023, PUMA,
https://arxiv.org/abs/2307.12533; Lu et al. 2025, BumbleBee, https://eprint.iacr.org/2023/1678, as SHAFT quotes it; Kei
and Chow 2025, SHAFT, NDSS, and https://github.com/andeskyl/SHAFT, approximations.py and configs/default.yaml.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from costmodel import ops
from costmodel.calibration import crypten_own
from costmodel.calibration.sigma_rows import attention_ops, linear
from costmodel.calibration.validate_sigma import GIBIBYTE
from costmodel.config.units import BYTES
from costmodel.engine.engines import walk
from costmodel.ops import Op
from costmodel.protocols import crypten_primitives
from costmodel.protocols.engine_protocols import ENGINE_PROTOCOLS
from costmodel.protocols.primitives import Comm, total_comm

ROWS = Path(__file__).parents[1] / "testbeds" / "printed_rows.csv"
LAYERS, HEADS, WIDTH, INNER = 12, 12, 768, 3072
CAUSAL = {"BERT-base": False, "GPT-2": True}
SHAFT, SHAFT_STEPS = "SHAFT on CrypTen", 16  # softmax_ode_iter_num
VOCABULARIES = {"BERT-base": 30522, "GPT-2": 50257}
PARTS: dict[str, tuple[type, ...]] = {
    "activation": (ops.Silu, ops.Gelu),
    "softmax": (ops.Softmax,),
    "norm": (ops.LayerNorm,),
    "": (Op,),
}
ACTIVATIONS: dict[str, Callable[..., Op]] = {
    **dict.fromkeys(ENGINE_PROTOCOLS, partial(ops.Gelu, form="piecewise")),
    "crypten": ops.Silu,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedRow:
    """A printed row: `gigabytes` as printed, of all ops or those of one `part`. Rows of a `group` count alike."""

    group: str
    protocol: str
    model: str
    seq_len: int
    part: str
    gigabytes: str
    fitted: bool

    @property
    def name(self) -> str:
        return f"{self.group}: {self.model} T={self.seq_len}{self.part and f', {self.part}'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedCheck:
    """A row and its prediction, in the row's unit; `factor` is the one of its group, None if none was fitted."""

    row: PrintedRow
    factor: float | None
    gigabytes: float

    @property
    def error(self) -> float:
        return self.gigabytes / float(self.row.gigabytes) - 1

    @property
    def is_equal(self) -> bool:
        """Whether both are equal to the last printed digit."""
        digits = len(self.row.gigabytes.partition(".")[2])
        return round(self.gigabytes, digits) == float(self.row.gigabytes)


def printed_rows(path: Path = ROWS) -> tuple[PrintedRow, ...]:
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(_row(record) for record in csv.DictReader(file))


def _row(record: dict[str, str]) -> PrintedRow:
    values: dict[str, Any] = record | {"seq_len": int(record["seq_len"]), "fitted": record["fitted"] == "yes"}
    return PrintedRow(**values)


def printed_checks(rows: Sequence[PrintedRow]) -> tuple[PrintedCheck, ...]:
    """Return the check of every row, with the factor of its group or in GiB."""
    factors = {row.group: float(row.gigabytes) * BYTES["GB"] / own_bytes(row) for row in rows if row.fitted}
    checks = []
    for row in rows:
        factor = factors.get(row.group)
        gigabytes = own_bytes(row) / GIBIBYTE if factor is None else own_bytes(row) * factor / BYTES["GB"]
        checks.append(PrintedCheck(row=row, factor=factor, gigabytes=gigabytes))
    return tuple(checks)


def own_bytes(row: PrintedRow) -> int:
    """Return the bytes of all parties by formula, online and offline; for `crypten` the first party is the dealer."""
    some = [op for op in model_ops(row) if isinstance(op, PARTS[row.part])]
    theirs = (SHAFT_FUNCTIONS if row.group == SHAFT else OWN_FUNCTIONS) if row.protocol == "crypten" else {}
    ours = [op for op in some if type(op) not in theirs]
    priced = walk(row.protocol, ours, ENGINE_PROTOCOLS[row.protocol].setting())
    cost = total_comm([*priced, *(theirs[type(op)](op) for op in some if type(op) in theirs)])
    return cost.online_bytes if row.protocol == "crypten" else cost.sent_bytes


def shaft_activation(op: ops.Silu) -> Comm:
    """Return the cost of ReLU plus GELU's difference from it near 0, a sum of sines of a masked, opened number."""
    elements = op.rows * op.features
    pair = crypten_primitives.product(elements, elements)
    signs = crypten_primitives.positive_part(elements), crypten_primitives.is_negative(elements)
    return total_comm([*signs, crypten_primitives.opened(elements), pair])


def shaft_softmax(op: ops.Softmax) -> Comm:
    """Return the cost of clipping scores at both ends and of steps along a differential equation, two products each."""
    elements = op.heads * op.queries * op.keys
    steps = [crypten_primitives.product(elements, elements)] * 2 * SHAFT_STEPS
    return total_comm([crypten_primitives.positive_part(2 * elements), *steps])


# CrypTen's own functions, used in place of ours
OWN_FUNCTIONS: dict[type, Callable[[Any], Comm]] = {
    ops.LayerNorm: crypten_own.layer_norm,
    ops.Silu: crypten_own.silu,
    ops.Softmax: crypten_own.softmax,
}
SHAFT_FUNCTIONS = OWN_FUNCTIONS | {ops.Silu: shaft_activation, ops.Softmax: shaft_softmax}


def model_ops(row: PrintedRow) -> tuple[Op, ...]:
    """Return the ops of the model without additions, which are local."""
    tokens = row.seq_len
    norm = ops.LayerNorm(rows=tokens, features=WIDTH)
    queries_keys_values = [linear(tokens, WIDTH, WIDTH)] * 3
    attention = (norm, *queries_keys_values, *attention_ops(tokens, HEADS, WIDTH, causal=CAUSAL[row.model]))
    activation = ACTIVATIONS[row.protocol](rows=tokens, features=INNER)
    ffn = (norm, linear(tokens, WIDTH, INNER), activation, linear(tokens, INNER, WIDTH))
    return (attention + ffn) * LAYERS + (norm,) + (_outside(row) if row.group == SHAFT else ())


def _outside(row: PrintedRow) -> tuple[Op, ...]:
    vocab = VOCABULARIES[row.model]
    embedding = ops.TokenEmbedding(tokens=row.seq_len, vocab=vocab, features=WIDTH)
    projection = ops.VocabProjection(rows=row.seq_len, features=WIDTH, vocab=vocab)
    return (embedding, projection) if CAUSAL[row.model] else (embedding,)
