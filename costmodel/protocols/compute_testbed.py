"""Seconds that parties compute, per kind of op: affine in the work an op does, fitted on measured runs.

    seconds of an op = fixed_s of its kind + sum over units of work of per_unit_s x count

Measured with a process per party on one machine, so what it takes to hand messages to TCP and back is in them.
Coefficients are at least 0, so that seconds never fall as an op grows; but for cheetah's matrix products, whose work
depends on how they are cut to blocks. A kind is a type of op in one of its forms, with its weights secret-shared or
held by the server. What is fitted, and on which machine, is a testbed file. A kind that came later than a testbed has
the seconds of its stand-in there.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from costmodel import ops
from costmodel.config.schema import decode
from costmodel.config.strict_yaml import dump, load_mapping
from costmodel.errors import UnpricedOpError, UserError
from costmodel.ops import Op
from costmodel.protocols import cheetah

SCHEMA_VERSION = 1


def _matrix(rows: int, inner: int, columns: int) -> dict[str, int]:
    return {"products": rows * inner * columns, "elements": rows * inner + inner * columns + rows * columns}


def _embedding(op: ops.TokenEmbedding) -> dict[str, int]:
    if op.encoding == "lookup":
        return {"comparisons": op.tokens * op.vocab, "products": op.tokens * op.vocab * op.features}
    return _matrix(op.tokens, op.vocab, op.features)


def _per_head(op: Any, rows: int, inner: int, columns: int) -> dict[str, int]:
    return {"heads": op.heads} | {unit: op.heads * count for unit, count in _matrix(rows, inner, columns).items()}


def _elements(op: Any) -> dict[str, int]:
    return {"elements": op.rows * op.features}


def _scores(op: Any) -> dict[str, int]:
    return {"elements": op.heads * op.queries * op.keys}


# op type -> how much of which work an op of that type does; every kind has a fixed part besides
WORK: dict[type, Callable[[Any], dict[str, int]]] = {
    ops.TokenEmbedding: _embedding,
    ops.PositionEmbedding: _elements,
    ops.LayerNorm: lambda op: {"rows": op.rows} | _elements(op),  # as with gain and bias, also without
    ops.RmsNorm: lambda op: {"rows": op.rows} | _elements(op),
    ops.FrozenNorm: _elements,  # as if centred, also where it is not
    ops.Linear: lambda op: _matrix(op.rows, op.in_features, op.out_features),
    ops.PackHeads: lambda op: {"elements": op.rows * (op.query_features + 2 * op.key_features)},
    ops.Rotary: lambda op: {"elements": op.rows * (op.heads + (op.key_heads or op.heads)) * op.rotary_dim},
    ops.RepeatHeads: lambda op: {"elements": op.rows * op.heads * op.head_dim},
    ops.AttentionScores: lambda op: _per_head(op, op.queries, op.head_dim, op.keys),
    ops.Temperature: _scores,
    ops.Softmax: lambda op: {"rows": op.heads * op.queries} | _scores(op),
    ops.ShapedAttention: _scores,
    ops.AttentionMix: lambda op: _per_head(op, op.queries, op.keys, op.head_dim),
    ops.Gelu: _elements,
    ops.Relu: _elements,
    ops.LeakyRelu: _elements,
    ops.Square: _elements,
    ops.Silu: _elements,
    ops.Sigmoid: _elements,
    ops.Tanh: _elements,
    ops.Multiply: _elements,
    ops.Scale: _elements,
    ops.Add: _elements,
    ops.ScaledAdd: _elements,
    ops.TakeRows: _elements,
    ops.JoinRows: _elements,
    ops.KeyValueCache: lambda op: {"elements": (op.past_len + op.rows) * op.features},
    ops.VocabProjection: lambda op: _matrix(op.rows, op.features, op.vocab),
}

WEIGHTED = (
    ops.TokenEmbedding, ops.PositionEmbedding, ops.LayerNorm, ops.RmsNorm, ops.FrozenNorm, ops.Linear, ops.LeakyRelu,
    ops.ScaledAdd, ops.VocabProjection,
)  # fmt: skip

# kind -> the kind whose seconds it has on a testbed from before it was measured. A square is a product of two secrets,
# the same kernel. A frozen norm is a product with a weight and, if centred, a mean per row; a scaled addition is two
# such products: on a busy machine, one took 0.5 to 1.8 times as long as the other. A scale is a product with a public
# number, as a temperature is. A logistic function is a SiLU without its product,
# and a hyperbolic tangent a GELU without its polynomials. Under semi2k and aby3, the least seconds of each were 0.6 to
# 1.3 times those of its stand-in, at 32 x 64 and 128 x 512 elements, op beside op in one run.
STAND_INS = {
    "Square": "Multiply",
    "Scale": "Temperature",
    "Sigmoid": "Silu",
    "Tanh": "Gelu.tanh",
    "JoinRows": "KeyValueCache",
    "FrozenNorm.secret": "ScaledAdd.secret",
    "FrozenNorm.server": "ScaledAdd.server",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class KindSeconds:
    """The fit of one kind.

    fixed_s, per_unit_s: seconds per op, and per unit of each work in `WORK`.
    num_points: ops it is fitted on. worst_error: greatest relative error on them. held_out_error: greatest relative
    error on an op that was left out of the fit, which bounds what to expect of sizes between those measured.
    """

    fixed_s: float
    per_unit_s: dict[str, float]
    num_points: int
    worst_error: float
    held_out_error: float

    def __post_init__(self) -> None:
        errors = {"worst_error": self.worst_error, "held_out_error": self.held_out_error}
        for name, value in {"fixed_s": self.fixed_s, **self.per_unit_s, **errors}.items():
            if not 0 <= value < math.inf:
                raise UserError(f"`{name}` must be finite and at least 0, but got {value}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeTestbed:
    """What one machine needs for each kind of op under one protocol, all parties on that machine.

    engine, machine, measured_on: provenance. start_s: keys and first oblivious transfers, once a run.
    """

    protocol: str
    engine: str
    machine: str
    measured_on: str
    ring_bits: int
    fraction_bits: int
    start_s: float
    kinds: dict[str, KindSeconds]
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < math.inf:
            raise UserError(f"`start_s` must be finite and at least 0, but got {self.start_s}.")


def work(op: Op, protocol: str) -> dict[str, int]:
    """What an op does, by unit. Raises UserError for an op type without an entry in `WORK`."""
    if type(op) not in WORK:
        raise UnpricedOpError(f"no work is stated for {type(op).__name__}; add one to WORK.")
    units = WORK[type(op)](op)
    if protocol != "cheetah" or "products" not in units:
        return units
    return {unit: units[unit] for unit in ("heads", "comparisons") if unit in units} | cheetah.matrix_work(op)


def kind(op: Op, weights: str) -> str:
    """The type of the op, its forms, and who holds its weights, if it has any: `secret` or `server`."""
    forms = [value for field in fields(op) if isinstance(value := getattr(op, field.name), str)]
    return ".".join([type(op).__name__, *forms, *([weights] if isinstance(op, WEIGHTED) else [])])


def seconds_of(op: Op, weights: str, testbed: ComputeTestbed) -> float:
    """Seconds of one op, start not included. Raises UserError for a kind or unit that the testbed has not measured."""
    measured = _measured(op, weights, testbed)
    try:
        units = work(op, testbed.protocol)
        return measured.fixed_s + sum(measured.per_unit_s[unit] * count for unit, count in units.items())
    except KeyError as error:
        raise UnpricedOpError(
            f"{kind(op, weights)} of the testbed has seconds per {', '.join(measured.per_unit_s)}, but none per "
            f"{error.args[0]}; {_remedy(testbed)}"
        ) from None


def error_s_of(op: Op, weights: str, testbed: ComputeTestbed) -> float:
    """How far off the seconds of an op may be, by the held-out error of its kind."""
    return seconds_of(op, weights, testbed) * _measured(op, weights, testbed).held_out_error


def load_compute(path: Path) -> ComputeTestbed:
    """The testbed in a YAML file. Raises UserError, naming the file, also for one of another schema."""
    return decode(ComputeTestbed, load_mapping(path), str(path))


def dump_compute(testbed: ComputeTestbed) -> str:
    """The text of a testbed file, seconds to four digits."""
    data = asdict(testbed)
    for measured in data["kinds"].values():
        measured["per_unit_s"] = {unit: _rounded(value) for unit, value in measured["per_unit_s"].items()}
        measured.update({name: _rounded(measured[name]) for name in ("fixed_s", "worst_error", "held_out_error")})
    return dump({"schema_version": data.pop("schema_version"), **data, "start_s": _rounded(testbed.start_s)})


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _measured(op: Op, weights: str, testbed: ComputeTestbed) -> KindSeconds:
    name = kind(op, weights)
    if name not in testbed.kinds and STAND_INS.get(name) in testbed.kinds:
        return testbed.kinds[STAND_INS[name]]
    if name not in testbed.kinds:
        raise UserError(f"the testbed of protocol {testbed.protocol} has no seconds for {name}; {_remedy(testbed)}")
    return testbed.kinds[name]


def _remedy(testbed: ComputeTestbed) -> str:
    return f"measure it with `python -m costmodel calibrate --engine spu --protocol {testbed.protocol}`."
