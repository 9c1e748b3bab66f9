"""The models of transformers that a block of ours computes: their settings, the names and layout of their weights."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from costmodel.errors import UserError
from costmodel.ops import ROTARY_BASE
from search_spaces.architecture import Architecture, Ffn, Layer, gelu_form
from search_spaces.bases import GPT2_LAYER, LLAMA_LAYER, MAX_LAYERS
from search_spaces.block import BLOCKS, BlockName

EPSILON = 1e-5  # of every LayerNorm, here and in GPT-2's and Pythia's configurations
LINEAR_WEIGHTS = tuple(f".{linear}.weight" for linear in ("qkv", "out", "up", "down"))  # of a layer
# Their activations: our FFN, and the form of its GELU.
ACTIVATIONS: dict[str, tuple[Ffn, str]] = {
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "gelu": ("gelu", "exact"),
    "relu": ("relu", "tanh"),
}
GATE_ACTIVATIONS: dict[str, tuple[Ffn, str]] = {"silu": ("swiglu", "tanh"), "relu": ("reglu", "tanh")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Names and layout in a model of transformers of what a block of ours computes.

    config: their class. sizes: their settings to our dimensions. activation: their setting.
    layer: its norms are those of every layer, and that of `norm1` the last. bias: whether its linears have one.
    turns: whether the base of rotary angles is a setting, `rope_theta`.
    fixed: values that our blocks have built in. read_only: the same, of settings that are not written.
    names: their modules to ours; `{}` is the layer.
    transposed: whether weights of a layer's linears are in_features x out_features.
    interleaved: whether the packed rows are heads x (query, key, value), not (query, key, value) x heads.
    """

    block: BlockName
    config: str
    sizes: Mapping[str, str]
    activation: str = "hidden_act"
    activations: Mapping[str, tuple[Ffn, str]] = field(default_factory=lambda: ACTIVATIONS)
    layer: Layer = GPT2_LAYER
    bias: bool = True
    turns: bool = False
    fixed: Mapping[str, Any]
    read_only: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str]
    transposed: bool = False
    interleaved: bool = False


PYTHIA_ROTARY = 1 / (BLOCKS["pythia"].rotary_share or 1)
SIZES = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "d_ff",
}
LLAMA = Family(
    block="llama",
    config="LlamaConfig",
    sizes={**SIZES, "num_key_value_heads": "num_kv_heads", "head_dim": "head_size", "rms_norm_eps": "norm_epsilon"},
    activations=GATE_ACTIVATIONS,
    layer=LLAMA_LAYER,
    bias=False,
    turns=True,
    fixed={"attention_bias": False, "mlp_bias": False},
    names={
        "model.embed_tokens": "embed",
        "model.layers.{}.input_layernorm": "layers.{}.norm1",
        "model.layers.{}.self_attn.q_proj": "layers.{}.attention.q",
        "model.layers.{}.self_attn.k_proj": "layers.{}.attention.k",
        "model.layers.{}.self_attn.v_proj": "layers.{}.attention.v",
        "model.layers.{}.self_attn.o_proj": "layers.{}.attention.out",
        "model.layers.{}.post_attention_layernorm": "layers.{}.norm2",
        "model.layers.{}.mlp.gate_proj": "layers.{}.ffn.gate",
        "model.layers.{}.mlp.up_proj": "layers.{}.ffn.up",
        "model.layers.{}.mlp.down_proj": "layers.{}.ffn.down",
        "model.norm": "final_norm",
        "lm_head": "logits",
    },
)
QWEN2 = replace(LLAMA, block="qwen2", config="Qwen2Config", fixed={"use_sliding_window": False})
# By `model_type`; of those with one block the first is written. Source: transformers' models.gpt2, models.gpt_neox,
# whose lm_head is `embed_out` and whose `rope_parameters` are `rotary_pct` and `rotary_emb_base` before version 5,
# models.llama, models.mistral and models.qwen2, whose `rope_parameters` are `rope_theta` and `rope_scaling` before it.
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        block="gpt2",
        config="GPT2Config",
        sizes={
            "vocab_size": "vocab_size",
            "n_positions": "context",
            "n_embd": "d_model",
            "n_layer": "num_layers",
            "n_head": "num_heads",
            "n_inner": "d_ff",
        },
        activation="activation_function",
        fixed={
            "layer_norm_epsilon": EPSILON,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        names={
            "transformer.wte": "embed",
            "transformer.wpe": "position",
            "transformer.h.{}.ln_1": "layers.{}.norm1",
            "transformer.h.{}.attn.c_attn": "layers.{}.attention.qkv",
            "transformer.h.{}.attn.c_proj": "layers.{}.attention.out",
            "transformer.h.{}.ln_2": "layers.{}.norm2",
            "transformer.h.{}.mlp.c_fc": "layers.{}.ffn.up",
            "transformer.h.{}.mlp.c_proj": "layers.{}.ffn.down",
            "transformer.ln_f": "final_norm",
            "lm_head": "logits",
        },
        transposed=True,
    ),
    "gpt_neox": Family(
        block="pythia",
        config="GPTNeoXConfig",
        sizes=SIZES,
        fixed={
            "layer_norm_eps": EPSILON,
            "use_parallel_residual": True,
            "attention_bias": True,
            "rotary_pct": PYTHIA_ROTARY,
            "rotary_emb_base": ROTARY_BASE,
        },
        read_only={
            "rope_parameters": {
                "rope_theta": ROTARY_BASE,
                "partial_rotary_factor": PYTHIA_ROTARY,
                "rope_type": "default",
            }
        },
        names={
            "gpt_neox.embed_in": "embed",
            "gpt_neox.layers.{}.input_layernorm": "layers.{}.norm1",
            "gpt_neox.layers.{}.attention.query_key_value": "layers.{}.attention.qkv",
            "gpt_neox.layers.{}.attention.dense": "layers.{}.attention.out",
            "gpt_neox.layers.{}.post_attention_layernorm": "layers.{}.norm2",
            "gpt_neox.layers.{}.mlp.dense_h_to_4h": "layers.{}.ffn.up",
            "gpt_neox.layers.{}.mlp.dense_4h_to_h": "layers.{}.ffn.down",
            "gpt_neox.final_layer_norm": "final_norm",
            "lm_head": "logits",
            "embed_out": "logits",
        },
        interleaved=True,
    ),
    LLAMA.block: LLAMA,  # types that are named as our blocks
    QWEN2.block: QWEN2,
    "mistral": replace(LLAMA, config="MistralConfig", fixed={"sliding_window": None}),
}


def plain_settings(architecture: Architecture) -> tuple[Family, dict[str, Any]] | None:
    """The family of theirs that computes the same, and its settings; None if there is none."""
    family = next((family for family in FAMILIES.values() if family.block == architecture.block), None)
    activation = None if family is None else _plain_activation(family, architecture)
    share = architecture.block_facts.rotary_share
    if family is None or activation is None or (share is not None and architecture.head_dim % (2 * share)):
        return None
    whole = {"num_kv_heads": architecture.num_kv_heads or architecture.num_heads, "head_size": architecture.head_dim}
    settings = {
        **{theirs: whole.get(ours, getattr(architecture, ours)) for theirs, ours in family.sizes.items()},
        **family.fixed,
        **({"rope_theta": architecture.rotary_base} if family.turns else {}),
        family.activation: activation,
        "tie_word_embeddings": architecture.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return family, settings


def _plain_activation(family: Family, architecture: Architecture) -> str | None:
    """Their name of the activation, if every layer is one of the family's own; else None."""
    layer = architecture.layers[0]
    if layer.ffn == "none":
        return None
    plain = replace(
        architecture,
        layers=(replace(family.layer, ffn=layer.ffn),) * architecture.num_layers,
        final_norm=family.layer.norm1,
        bias=family.bias,
        softmax="exact",
        folded=False,
        num_kv_heads=architecture.num_kv_heads if "num_kv_heads" in family.sizes.values() else None,
        head_size=architecture.head_size if "head_size" in family.sizes.values() else None,
    )
    if architecture != plain:
        return None
    form = gelu_form(architecture, layer)
    kind = (layer.ffn, "tanh") if form is None else ("gelu", form)
    return next((name for name, theirs in family.activations.items() if theirs == kind), None)


def architecture_of(config: Any, path: str) -> Architecture:
    """Raises UserError, naming what, for a model that is not exactly what a block can be."""
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"{path!r} must be a model of type {known} or an export of ours, but is {config.model_type!r}.")
    family, settings = FAMILIES[config.model_type], config.to_dict()
    window = settings.get("sliding_window")
    if window is not None and window >= (settings.get("max_position_embeddings") or math.inf):  # it hides no position
        settings |= {"sliding_window": None, "use_sliding_window": False}
    for name, value in {**family.fixed, **family.read_only}.items():
        if settings.get(name, value) != value:
            raise UserError(
                f"`{name}` of {path!r} must be {value!r}, but is {settings[name]!r}; it cannot be imported."
            )
    activation, known = getattr(config, family.activation), ", ".join(family.activations)
    if activation not in family.activations:
        raise UserError(f"the activation of {path!r} must be one of {known}, but is {activation!r}.")
    ffn, form = family.activations[activation]
    sizes: dict[str, Any] = {ours: getattr(config, theirs, None) for theirs, ours in family.sizes.items()}
    sizes["d_ff"] = sizes["d_ff"] or 4 * sizes["d_model"]  # GPT-2's is None where it is that
    return imported(
        path,
        replace(family.layer, ffn=ffn),
        block=family.block,
        bias=family.bias,
        tied_embeddings=config.tie_word_embeddings,
        gelu="exact" if form == "exact" else "tanh",
        rotary_base=_rotary_base(settings, path) if family.turns else ROTARY_BASE,
        **sizes,
    )


def imported(path: str, layer: Layer, *, num_layers: int, **settings: Any) -> Architecture:
    """The architecture of a model of others, of equal layers and a final norm as they have.

    No number is said of heads that is the one that they have anyway, so that it has one id. Raises UserError, naming
    the path, for settings that no model can have.
    """
    try:
        if not 1 <= num_layers <= MAX_LAYERS:  # before they are made
            raise UserError(f"the number of layers must be from 1 to {MAX_LAYERS}, but is {num_layers}.")
        architecture = Architecture(layers=(layer,) * num_layers, final_norm=layer.norm1, **settings)
    except UserError as error:
        raise UserError(f"{path!r} must have the settings of a model that can be made, but: {error}") from None
    heads = architecture.num_heads
    return replace(
        architecture,
        num_kv_heads=None if architecture.num_kv_heads == heads else architecture.num_kv_heads,
        head_size=None if architecture.head_dim * heads == architecture.d_model else architecture.head_size,
    )


def _rotary_base(settings: Mapping[str, Any], path: str) -> float:
    """Raises UserError for angles that are not those of one base."""
    rope = settings.get("rope_parameters") or {**settings, **(settings.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(f"`rope_type` of {path!r} must be 'default', but is {kind!r}; it cannot be imported.")
    return float(rope.get("rope_theta", ROTARY_BASE))


def _names(family: Family, architecture: Architecture) -> Iterator[tuple[str, str]]:
    """(theirs, ours) of every weight that there may be."""
    for theirs, ours in family.names.items():
        for index in range(architecture.num_layers if "{}" in theirs else 1):
            for suffix in ("weight", "bias"):
                yield f"{theirs.format(index)}.{suffix}", f"{ours.format(index)}.{suffix}"


def from_theirs(family: Family, architecture: Architecture, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names, heads = _names(family, architecture), architecture.num_heads
    return {ours: _laid_out(family, ours, state[theirs], heads, 3) for theirs, ours in names if theirs in state}


def to_theirs(family: Family, architecture: Architecture, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names, heads = _names(family, architecture), architecture.num_heads
    return {theirs: _laid_out(family, ours, weights[ours], 3, heads) for theirs, ours in names if ours in weights}


def _laid_out(family: Family, name: str, value: Tensor, outer: int, inner: int) -> Tensor:
    """A weight of ours as theirs, or back; name: ours. No family both transposes and interleaves."""
    if family.interleaved and ".qkv." in name:  # rows of outer x inner x head_dim as inner x outer x head_dim
        value = value.view(outer, inner, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
    return value.T if family.transposed and name.endswith(LINEAR_WEIGHTS) else value
