"""Published runs of SIGMA, as data: bytes and keys of the blocks of models, beside those by formula.

They do not include embedding, final norm or vocabulary projection. The keys include the mask of the output and are
padded to a page.

Sources: logs of https://github.com/ponyyuhan/SUF_new, commit 36d6e59, folder `results`, of the unchanged code on two
GPUs of one machine, seconds as medians of 3 to 6 runs; tables of the same repository; Gupta et al. 2024, SIGMA,
https://eprint.iacr.org/2023/1269, tables of the evaluation, as printed (Llama-2-13B of the abstract).
"""

import csv
from dataclasses import dataclass
from typing import Any

from costmodel import ops
from costmodel.ops import Op
from costmodel.protocols.derived import TESTBEDS
from costmodel.protocols.primitives import Comm, total_comm
from costmodel.protocols.sigma_primitives import SigmaSetting
from costmodel.protocols.sigma_programs import comm

ROWS = TESTBEDS / "sigma_rows.csv"
RUN_BYTES = 2  # of both parties, which synchronise once: sigma.cu, `peer->sync`
PAGE = 4096  # backend/sigma.h, SIGMAKeygen::close
SIZES = ("num_layers", "num_heads", "d_model", "d_ff", "ring_bits", "seq_len")


@dataclass(frozen=True, kw_only=True, slots=True)
class SigmaRow:
    """One run, or the median of several; `fitted` says whether seconds were fitted on it.

    `numbers` are the numbers that the source states, as text by column of the file: `latency_s` and `comm_s` are
    seconds online, and of these the seconds waiting for bytes; bytes are of both parties, key bytes of one party;
    `gpu_rounds` are without those of 1/sqrt on the CPU.
    """

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
    numbers: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.model} T={self.seq_len}{'' if self.network is None else f' {self.network}'}"

    @property
    def setting(self) -> SigmaSetting:
        return SigmaSetting(ring_bits=self.ring_bits)

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops of all blocks without additions, which are local; queries, keys and values are one linear."""
        tokens, width, heads, gated = self.seq_len, self.d_model, self.num_heads, self.family == "Llama"
        causal, scaled = self.family != "BERT", self.family != "GPT-Neo"
        square: dict[str, Any] = {"heads": heads, "queries": tokens, "keys": tokens}
        inner: dict[str, Any] = {"rows": tokens, "features": self.d_ff}

        def linear(in_features: int, out_features: int) -> Op:
            return ops.Linear(rows=tokens, in_features=in_features, out_features=out_features, bias=True)

        norm: Op = (ops.RmsNorm if gated else ops.LayerNorm)(rows=tokens, features=width)
        rotary = [ops.Rotary(rows=tokens, heads=heads, rotary_dim=width // heads)] if gated else []
        attention = [
            ops.AttentionScores(**square, head_dim=width // heads, scaled=scaled, causal=causal),
            ops.Softmax(**square, causal=causal),
            ops.AttentionMix(**square, head_dim=width // heads),
            linear(width, width),
        ]
        up = [linear(width, self.d_ff)] * (1 + gated)
        activation = [ops.Silu(**inner), ops.Multiply(**inner)] if gated else [ops.Gelu(**inner, form="exact")]
        ffn = [*up, *activation, linear(self.d_ff, width)]
        return (norm, linear(width, 3 * width), *rotary, *attention, norm, *ffn) * self.num_layers

    @property
    def comm(self) -> Comm:
        """The cost of all ops by formula, without costs per run."""
        return total_comm(comm(op, self.setting) for op in self.ops)

    @property
    def run_bytes(self) -> int:
        """Bytes of a whole run, of both parties."""
        return self.comm.online_bytes + RUN_BYTES

    @property
    def run_key_bytes(self) -> int:
        """Bytes of a party's keys for a run, with the output's mask and 1 to 4096 bytes of padding."""
        return ((self.comm.key_bytes + 8 * self.seq_len * self.d_model) // PAGE + 1) * PAGE


def sigma_rows() -> tuple[SigmaRow, ...]:
    rows = []
    with ROWS.open(encoding="utf-8", newline="") as file:
        for record in csv.DictReader(file):
            sizes: dict[str, Any] = {name: int(record.pop(name)) for name in SIZES}
            named: dict[str, Any] = {name: record.pop(name) for name in ("model", "family")}
            named |= {"network": record.pop("network") or None, "fitted": record.pop("fitted") == "yes"}
            del record["source"]
            rows.append(SigmaRow(**sizes, **named, numbers={name: text for name, text in record.items() if text}))
    return tuple(rows)
