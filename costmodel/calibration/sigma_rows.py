"""Published runs of SIGMA, as data: bytes, keys, rounds and seconds of the blocks of models.

They do not include embedding, final norm or vocabulary projection. The keys include the mask of the output and are
padded to a page. Values that a source does not state are None.

Sources: logs of https://github.com/ponyyuhan/SUF_new, commit 36d6e59, folder `results`, of the unchanged code on two
GPUs of one machine, seconds as medians of 3 to 6 runs; tables of the same repository; Gupta et al. 2024, SIGMA,
https://eprint.iacr.org/2023/1269, tables of the evaluation, as printed (Llama-2-13B of the abstract).
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel import ops
from costmodel.ops import Op
from costmodel.protocols.primitives import Comm, total_comm
from costmodel.protocols.sigma import CLASSES, Class, class_of
from costmodel.protocols.sigma_primitives import SigmaSetting
from costmodel.protocols.sigma_programs import comm

ROWS = Path(__file__).parents[1] / "testbeds" / "sigma_rows.csv"
RUN_BYTES = 2  # of both parties, which synchronise once: sigma.cu, `peer->sync`
WHOLE = ("num_layers", "num_heads", "d_model", "d_ff", "ring_bits", "seq_len")
PAGE = 4096  # backend/sigma.h, SIGMAKeygen::close


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The blocks of a family: whether attention is causal, scores have a factor, and FFNs are gated."""

    causal: bool = True
    scaled: bool = True
    gated: bool = False


FAMILIES = {
    "GPT-2": Family(),
    "GPT-Neo": Family(scaled=False),
    "BERT": Family(causal=False),
    "Llama": Family(gated=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SigmaRow:
    """One run, or the median of several; `fitted` says whether seconds are fitted on it.

    Attributes:
        latency_s, comm_s: Seconds of the parties online, and of these the seconds waiting for bytes.
        class_s: Seconds of each class of op, waiting included.
        sent_bytes, class_bytes, key_bytes: Bytes of both parties, and of one party's keys.
        gpu_rounds: Rounds as the source counts them, without those of 1/sqrt on the CPU.
    """

    source: str
    model: str
    family: str
    num_layers: int
    num_heads: int
    d_model: int
    d_ff: int
    ring_bits: int
    seq_len: int
    network: str | None
    fitted: bool
    latency_s: float | None
    comm_s: float | None
    class_s: dict[Class, float]
    sent_bytes: int | None
    class_bytes: dict[Class, int]
    key_bytes: int | None
    sent_gibibytes: str | None
    gpu_rounds: int | None

    @property
    def name(self) -> str:
        return f"{self.model} T={self.seq_len}{'' if self.network is None else f' {self.network}'}"

    @property
    def setting(self) -> SigmaSetting:
        return SigmaSetting(ring_bits=self.ring_bits)

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops of all blocks; queries, keys and values are one linear, as in the code."""
        return block_ops(self) * self.num_layers


def sigma_rows(path: Path = ROWS) -> tuple[SigmaRow, ...]:
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(_row(record) for record in csv.DictReader(file))


def block_ops(row: SigmaRow) -> tuple[Op, ...]:
    """Return the ops of one block without additions, which are local."""
    family, tokens, width, heads = FAMILIES[row.family], row.seq_len, row.d_model, row.num_heads
    norm: Op = (ops.RmsNorm if family.gated else ops.LayerNorm)(rows=tokens, features=width)
    turned = [ops.Rotary(rows=tokens, heads=heads, rotary_dim=width // heads)] if family.gated else []
    queries_keys_values = [linear(tokens, width, 3 * width), *turned]
    attention = attention_ops(tokens, heads, width, scaled=family.scaled, causal=family.causal)
    inner: Any = {"rows": tokens, "features": row.d_ff}
    up = linear(tokens, width, row.d_ff)
    ffn: list[Op] = (
        [up, up, ops.Silu(**inner), ops.Multiply(**inner)] if family.gated else [up, ops.Gelu(**inner, form="exact")]
    )
    return (norm, *queries_keys_values, *attention, norm, *ffn, linear(tokens, row.d_ff, width))


def attention_ops(tokens: int, heads: int, width: int, *, scaled: bool = True, causal: bool) -> tuple[Op, ...]:
    """Return the ops of attention over a prompt: scores, softmax, mix and output."""
    square: dict[str, Any] = {"heads": heads, "queries": tokens, "keys": tokens}
    return (
        ops.AttentionScores(**square, head_dim=width // heads, scaled=scaled, causal=causal),
        ops.Softmax(**square, causal=causal),
        ops.AttentionMix(**square, head_dim=width // heads),
        linear(tokens, width, width),
    )


def whole(row: SigmaRow) -> Comm:
    """Return the cost of a row's ops by formula, without costs per run."""
    return total_comm(comm(op, row.setting) for op in row.ops)


def by_class(row: SigmaRow) -> dict[Class, Comm]:
    return {name: total_comm(comm(op, row.setting) for op in row.ops if class_of(op) == name) for name in CLASSES}


def run_bytes(row: SigmaRow) -> int:
    """Return the bytes of a whole run, of both parties."""
    return whole(row).online_bytes + RUN_BYTES


def run_key_bytes(row: SigmaRow) -> int:
    """Return the bytes of a party's keys for a run, with the output's mask and 1 to 4096 bytes of padding."""
    keys = whole(row).key_bytes + 8 * row.seq_len * row.d_model
    return (keys // PAGE + 1) * PAGE


def linear(rows: int, in_features: int, out_features: int) -> Op:
    return ops.Linear(rows=rows, in_features=in_features, out_features=out_features, bias=True)


def _row(record: dict[str, str]) -> SigmaRow:
    given = {name: value or None for name, value in record.items()}
    values: dict[str, Any] = {name: given[name] for name in record if name in SigmaRow.__slots__}
    values |= {name: int(record[name]) for name in WHOLE}
    values |= {name: _number(given[name], int) for name in ("sent_bytes", "key_bytes", "gpu_rounds")}
    values |= {name: _number(given[name], float) for name in ("latency_s", "comm_s")}
    return SigmaRow(
        **values | {"fitted": record["fitted"] == "yes"},
        class_s={name: float(value) for name in CLASSES if (value := given.get(f"{name}_s")) is not None},
        class_bytes={name: int(value) for name in CLASSES if (value := given.get(f"{name}_bytes")) is not None},
    )


def _number(text: str | None, kind: Any) -> Any:
    return None if text is None else kind(text)
