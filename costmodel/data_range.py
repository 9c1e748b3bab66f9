"""The range of the data that costs were fitted on, and the parts of an op graph outside it.

A dimension is inside if it lies between the least and the greatest value in the data, give or take `MARGIN`. Outside,
costs are assumed to grow with the counts in the formulas, which no measurement checks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from costmodel import ops
from costmodel.ops import Node

MARGIN = 0.01  # relative difference, below which a fit cannot tell two sizes apart


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRange:
    """The range of the models in the data, all of which ran whole prompts and computed the logits of all tokens.

    dimensions: Name of a dimension (as in the function `dimensions`) -> its values in the data, ascending.
    op_types: The types of op in the data, and local types that count as if they were in it.
    """

    dimensions: dict[str, tuple[int, ...]]
    op_types: frozenset[type]

    def outside(self, graph: Iterable[Node]) -> tuple[str, ...]:
        """Return, in words, the parts of a graph that are outside the data, such as `d_model 12 (data: 768)`."""
        values, least, most = dimensions(graph), 1 - MARGIN, 1 + MARGIN
        beyond_data = [
            f"{name} {_range(beyond)} (data: {_range(known)})"
            for name, known in self.dimensions.items()
            if (beyond := [one for one in values[name] if not least * known[0] <= one <= most * known[-1]])
        ]
        unknown = {type(node.op).__name__ for node in graph} - {kind.__name__ for kind in self.op_types}
        caches = [node.op for node in graph if isinstance(node.op, ops.KeyValueCache)]
        projected = {node.op.rows for node in graph if isinstance(node.op, ops.VocabProjection)}
        tokens = {node.op.tokens for node in graph if isinstance(node.op, ops.TokenEmbedding)}
        # without past tokens, KeyValueCache only separates keys and values from queries
        used = unknown - (set() if any(cache.past_len for cache in caches) else {"KeyValueCache"})
        # if all tokens are projected, TakeRows only serves blocks of queries
        used -= {"TakeRows"} if "JoinRows" in unknown and projected <= tokens else set()
        ways = [text for kind, text in OTHER_WAYS.items() if kind.__name__ in used]
        ways += [f"batch {batch} (data: 1)"] if (batch := _batch(graph)) > 1 else []
        names = sorted(unknown - {kind.__name__ for kind in OTHER_WAYS})
        return (*beyond_data, *ways, *(f"{name} (data: none)" for name in names))


# type of op that a deployment adds -> the deployment and that of the data, in words
OTHER_WAYS: dict[type, str] = {
    ops.KeyValueCache: "phase decode (data: prefill)",
    ops.TakeRows: "projection last (data: all)",
    ops.JoinColumns: "vocabulary in blocks (data: all at once)",
    ops.JoinRows: "attention in blocks of queries (data: all at once)",
}


def _batch(graph: Iterable[Node]) -> int:
    return max((getattr(node.op, "sequences", 1) for node in graph), default=1)


def dimensions(graph: Iterable[Node]) -> dict[str, set[int]]:
    """Return the values of each dimension in the ops of a model, by name; an empty set if no op has the dimension.

    The names are d_model, d_ff, num_heads, vocab_size, seq_len (only the greatest) and num_layers. `num_heads` and
    `seq_len` are those of one sequence. `d_ff` is the input width of a linear whose output width is d_model, except for
    input widths that equal d_model or the width of attention's output.
    """
    values: dict[str, set[int]] = {name: set() for name in ("d_model", "d_ff", "num_heads", "vocab_size", "seq_len")}
    batch = _batch(graph)
    mixes = [node.op for node in graph if isinstance(node.op, ops.AttentionMix)]
    attended = {op.heads // op.sequences * op.head_dim for op in mixes}
    for node in graph:
        op = node.op
        if isinstance(op, ops.TokenEmbedding):
            values["d_model"].add(op.features)
            values["vocab_size"].add(op.vocab)
            values["seq_len"].add(op.tokens // batch)
        elif isinstance(op, ops.VocabProjection):
            values["vocab_size"].add(op.whole or op.vocab)
        elif isinstance(op, ops.AttentionMix):
            values["num_heads"].add(op.heads // op.sequences)
            values["seq_len"].add(op.keys)
    widths = values["d_model"] | attended
    linears = [node.op for node in graph if isinstance(node.op, ops.Linear)]
    values["d_ff"] = {op.in_features for op in linears if op.out_features in values["d_model"]} - widths
    values["seq_len"] = {max(values["seq_len"])} if values["seq_len"] else set()
    values["num_layers"] = {len({node.layer for node in graph if isinstance(node.layer, int)})} - {0}
    return values


def describe(outside: Iterable[str]) -> str:
    """Return `extrapolated: ` and the texts of `Pricer.extrapolated`, each dimension once; empty if there are none.

    `num_layers 6 (data: 12 to 18)` and `num_layers 10 (data: 12 to 18)` become `num_layers 6, 10 (data: 12 to 18)`. Of
    several ratios for one type of op, such as `Linear 2.0x`, only the largest is given.
    """
    values: dict[tuple[str, str], dict[str, None]] = {}
    for text in outside:
        name, _, rest = text.partition(" ")
        value, _, known = rest.partition(" (")
        values.setdefault((name, known), {})[value] = None
    listed = []
    for (name, known), those in values.items():
        if all(value.endswith("x") for value in those):
            shown = max(those, key=lambda value: float(value.removesuffix("x")))
        else:
            shown = ", ".join(sorted(those, key=lambda value: float(value) if value.isdigit() else math.inf))
        listed.append(f"{name} {shown}{known and f' ({known}'}")
    return f"extrapolated: {', '.join(listed)}" if listed else ""


def _range(values: Iterable[int]) -> str:
    least, *rest = sorted(values)
    return f"{least} to {rest[-1]}" if rest and rest[-1] != least else f"{least}"
