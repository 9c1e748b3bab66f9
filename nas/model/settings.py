"""Convert an architecture into plain data, the arguments of `nas.model.layers`. Exports include both."""

import math
from dataclasses import asdict, fields, replace
from typing import Any

from costmodel.execution.op_functions import LAYERNORM_EPSILON
from costmodel.ops import OnRows
from search_spaces.architecture import (
    Architecture,
    has_bias,
    has_bound,
    num_heads,
    num_kv_heads,
    positions_of,
    rotary_dim,
    softmax_form,
)
from search_spaces.forms import FFNS, NORMS, Norm
from search_spaces.inner import inner_epsilon, inner_norms, queries, score_cap
from search_spaces.lower import activation_ops


def settings_of(architecture: Architecture) -> dict[str, Any]:
    """Return the arguments of `PlainDecoder` except `parts`. Raises UserError if rotary positions do not fit a head."""
    return {
        "vocab_size": architecture.vocab_size,
        "d_model": architecture.d_model,
        "context": architecture.context,
        "has_windows": architecture.longest_context is not None,
        "has_table": "position" in architecture.block_facts.tables,
        "layers": [layer_settings(architecture, index) for index in range(architecture.num_layers)],
        "final_norm": norm_settings(architecture, architecture.final_norm),
        "is_tied": architecture.tied_embeddings,
        "embedding_scale": architecture.embedding_scale,
        "logit_scale": architecture.logit_scale,
        "logit_cap": architecture.logit_cap,
    }


def layer_settings(architecture: Architecture, index: int) -> dict[str, Any]:
    """Return the arguments of a layer's `Block` except `parts`. Raises UserError as `settings_of` does."""
    layer, block = architecture.layers[index], architecture.block_facts
    attention = None
    if block.is_shaped:
        heads = _heads(architecture, index, architecture.score_cap, 1.0 if architecture.folded else None)
        attention = {**heads, "bias": architecture.bias, "projects": index == 0}
    elif layer.attention != "none":
        attention = _attention(architecture, index)
    affine = not architecture.folded  # else linears include gain and bias
    return {
        "join": block.join,
        "queries": queries(architecture, layer),
        "scale": architecture.residual_scale,
        "norm1": norm_settings(architecture, layer.norm1, affine=affine or block.passes_values(index)),
        "attention": attention,
        "norm2": norm_settings(architecture, layer.norm2, affine=affine),
        "ffn": None if layer.ffn == "none" else _ffn(architecture, index),
    }


def inner_norm_settings(architecture: Architecture, index: int, name: str, **settings: Any) -> dict[str, Any] | None:
    """Return the settings of a norm of queries, keys, or outputs of attention or FFN; see `norm_settings`.

    index, name: of the layer, and of the node in it.
    """
    kind = inner_norms(architecture, architecture.layers[index]).get(name, "none")
    epsilon = inner_epsilon(architecture, f"layers.{index}.{name}")
    return norm_settings(replace(architecture, norm_epsilon=epsilon), kind, **settings)


def norm_settings(
    architecture: Architecture, kind: Norm, *, affine: bool = True, features: int | None = None, groups: int = 1
) -> dict[str, Any] | None:
    """Return a norm's settings; None for kind `none`.

    features: size of a row; None for d_model. affine: whether a norm that is not frozen has a gain and, if it is
        centred, a bias. groups: number of equal parts of a row that a frozen norm normalises separately.
    """
    form = NORMS[kind]
    return None if kind == "none" else {
        "features": features or architecture.d_model,
        "epsilon": LAYERNORM_EPSILON if form.is_centred else architecture.norm_epsilon,
        "centred": form.is_centred,
        "frozen": form.is_frozen,
        "affine": affine,
        "groups": groups,
    }  # fmt: skip


def _heads(architecture: Architecture, index: int, cap: float | None, factor: float | None) -> dict[str, Any]:
    """Return the settings that both kinds of attention have. factor: of the scores; None for 1 / sqrt(head_dim)."""
    layer, head_dim = architecture.layers[index], architecture.head_dim
    form = softmax_form(architecture, layer)
    return {
        "num_heads": num_heads(architecture, layer),
        "num_key_heads": num_kv_heads(architecture, layer),
        "head_dim": head_dim,
        "form": form,
        "has_bound": has_bound(form),
        "cap": cap,
        "query_factor": 1.0 if factor is None else factor * math.sqrt(head_dim),  # attention divides by that root
        "place": sum(one.attention != "none" for one in architecture.layers[:index]),
        "temperatures": architecture.context if layer.attention == "softmax-temperature" else None,
        "d_model": architecture.d_model,
    }


def _attention(architecture: Architecture, index: int) -> dict[str, Any]:
    layer, head_dim, block = architecture.layers[index], architecture.head_dim, architecture.block_facts
    factor = 1.0 if architecture.folded else architecture.score_scale
    heads, positions = (
        _heads(architecture, index, score_cap(architecture, layer), factor),
        positions_of(architecture, index),
    )
    inner, norms = inner_norms(architecture, layer), {}
    for name, count in (("q_norm", heads["num_heads"]), ("k_norm", heads["num_key_heads"])):
        kind, by_head = inner.get(f"attention.{name}", "none"), block.query_key_norm == "head"
        features = head_dim if by_head and kind == "rmsnorm" else count * head_dim
        groups = count if by_head else 1
        norms[name] = inner_norm_settings(architecture, index, f"attention.{name}", features=features, groups=groups)
    rotary = None
    if positions.rotates:
        rotary = {
            "context": architecture.context,
            "width": rotary_dim(architecture),
            "base": positions.base or architecture.rotary_base,
            "scaling": None if positions.scaling is None else asdict(positions.scaling),
        }
    return {
        **heads,
        "packs_qkv": block.packs_qkv,
        "biases": {name: has_bias(architecture, layer, f"attention.{name}") for name in ("qkv", "q", "k", "v", "out")},
        "norms": {**norms, "norm": inner_norm_settings(architecture, index, "attention.norm")},
        "rotary": rotary,
    }


def _ffn(architecture: Architecture, index: int) -> dict[str, Any]:
    layer = architecture.layers[index]
    common = {field.name for field in fields(OnRows)}
    activations = [
        (type(op).__name__, {field.name: getattr(op, field.name) for field in fields(op) if field.name not in common})
        for op in activation_ops(architecture, layer, 1).values()
    ]
    return {
        "d_model": architecture.d_model,
        "d_ff": architecture.d_ff,
        "is_fused": layer.ffn == "fused",
        "is_gated": FFNS[layer.ffn].is_gated,
        "biases": {name: has_bias(architecture, layer, f"ffn.{name}") for name in ("gate", "up", "down", "fused")},
        "activations": activations,
        "norm": inner_norm_settings(architecture, index, "ffn.norm"),
        "branch_gain": architecture.block_facts.branch_gain if layer.stabiliser == "scaled" else None,
    }
