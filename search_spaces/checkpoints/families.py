"""`FAMILIES`: the model types of transformers that have a block here, with the meaning of their settings and weights.

"Our" fields and nodes are those of `Architecture` and the op graph. `search_spaces.checkpoints.settings` uses what is
stated about settings, and `nas.conversion.huggingface` what is stated about weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from search_spaces.architecture import Layer
from search_spaces.bases import GPT2_LAYER, LLAMA_LAYER
from search_spaces.block import QUERIES_KEYS_VALUES, BlockName, Linear
from search_spaces.forms import Ffn, Norm

EPSILON = 1e-5  # of all LayerNorms in this package; usual in transformers too
# activation in transformers -> our FFN, and the form of its GELU (not used without GELU); then the same for gated FFNs
ACTIVATIONS: dict[str, tuple[Ffn, str]] = {
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "gelu": ("gelu", "exact"),
    "relu": ("relu", "tanh"),
}
GATE_ACTIVATIONS: dict[str, tuple[Ffn, str]] = {
    "silu": ("swiglu", "tanh"),
    "relu": ("reglu", "tanh"),
    "gelu_pytorch_tanh": ("geglu", "tanh"),
    "gelu_new": ("geglu", "tanh"),
    "gelu": ("geglu", "exact"),
}


class Number(NamedTuple):
    """A setting that holds our field `ours` in another form. read: setting -> field. write: the inverse of `read`."""

    ours: str
    read: Callable[[float], float]
    write: Callable[[float], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The settings and weight layout of one model type of transformers, in terms of one of our blocks.

    model_type, config: the type and its configuration class. A type that needs several blocks has a family for each.
    block, layer: our block, and our choices for every layer; the setting `activation` decides about its `ffn`.
    bias: whether linears have a bias by default. biases: setting -> the linears for which it decides instead.
    sizes: setting -> our field, for settings that are numbers.
    activation: name of the setting that states the activation. activations: its values -> our FFN, and form of GELU.
    turns: whether positions are rotary. partly: whether a setting gives the share of rotated features.
    fixed: setting -> the only value that our block supports. read_only: the same, for settings that exports leave out.
    names: module of transformers -> our node, or two nodes if it stacks their weights; `{}` is the number of the layer.
    transposed: whether weights of linears are in_features x out_features.
    interleaved: whether rows of packed weights are heads x (query, key, value), not (query, key, value) x heads.
    first_position: row of the position table for position 0.
    gain_offset: number to add to the stored gains of norms.
    scales_embedding: whether embeddings are multiplied by the square root of the width.
    final_norm: norm after the last layer; None if it is of the same kind as `norm1` of the layers.
    """

    model_type: str
    block: BlockName
    config: str
    sizes: Mapping[str, str | Number]
    activation: str = "hidden_act"
    activations: Mapping[str, tuple[Ffn, str]] = field(default_factory=lambda: ACTIVATIONS)
    layer: Layer = GPT2_LAYER
    bias: bool = True
    biases: Mapping[str, tuple[Linear, ...]] = field(default_factory=dict)
    turns: bool = True
    partly: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    read_only: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str | tuple[str, ...]]
    transposed: bool = False
    interleaved: bool = False
    first_position: int = 0
    gain_offset: float = 0.0
    scales_embedding: bool = False
    final_norm: Norm | None = None


SIZES: dict[str, str | Number] = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context",
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "d_ff",
}
HEADS = {**SIZES, "num_key_value_heads": "num_kv_heads"}
GROUPED = {**HEADS, "head_dim": "head_size"}
ATTENTION: tuple[Linear, ...] = (*QUERIES_KEYS_VALUES, "attention.qkv", "attention.out")
FFN: tuple[Linear, ...] = ("ffn.gate", "ffn.up", "ffn.down", "ffn.fused")
ATTENTION_BIAS, BIASES = {"attention_bias": ATTENTION}, {"attention_bias": ATTENTION, "mlp_bias": FFN}
OUTSIDE = {"model.embed_tokens": "embed", "model.norm": "final_norm", "lm_head": "logits"}
NORMS = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}
PROJECTIONS = {
    f"self_attn.{theirs}_proj": f"attention.{ours}" for theirs, ours in zip("qkvo", ("q", "k", "v", "out"), strict=True)
}
GATED = {f"mlp.{name}_proj": f"ffn.{name}" for name in ("gate", "up", "down")}


def _in_layers(modules: Mapping[str, str | tuple[str, ...]], folder: str = "model.layers") -> dict[str, Any]:
    """Return module names of a layer with ours, both with the path of the layer before them, whose number is `{}`."""

    def ours(name: str | tuple[str, ...]) -> str | tuple[str, ...]:
        return f"layers.{{}}.{name}" if isinstance(name, str) else tuple(f"layers.{{}}.{part}" for part in name)

    return {f"{folder}.{{}}.{theirs}": ours(name) for theirs, name in modules.items()}


def _inverse(number: float) -> float:
    return 1 / number


LLAMA = Family(
    model_type="llama",
    block="llama",
    config="LlamaConfig",
    sizes={**GROUPED, "rms_norm_eps": "norm_epsilon"},
    activations=GATE_ACTIVATIONS,
    layer=LLAMA_LAYER,
    bias=False,
    biases=BIASES,
    names=OUTSIDE | _in_layers(NORMS | PROJECTIONS | GATED),
)
AROUND = {  # norms before and after attention and FFN
    "input_layernorm": "norm1",
    "post_attention_layernorm": "attention.norm",
    "pre_feedforward_layernorm": "norm2",
    "post_feedforward_layernorm": "ffn.norm",
}
HEAD_NORMS = {f"self_attn.{part}_norm": f"attention.{part}_norm" for part in "qk"}
GEMMA = replace(
    LLAMA, model_type="gemma", config="GemmaConfig", biases=ATTENTION_BIAS, gain_offset=1.0, scales_embedding=True
)
GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    block="gemma2",
    config="Gemma2Config",
    sizes={
        **LLAMA.sizes,
        "query_pre_attn_scalar": Number("score_scale", lambda scalar: scalar**-0.5, lambda scale: round(scale**-2)),
        "attn_logit_softcapping": "score_cap",
        "final_logit_softcapping": "logit_cap",
    },
    activation="hidden_activation",
    names=OUTSIDE | _in_layers(AROUND | PROJECTIONS | GATED),
)
PYTHIA = Family(
    model_type="gpt_neox",
    block="pythia",
    config="GPTNeoXConfig",
    sizes=SIZES,
    biases=ATTENTION_BIAS,
    partly=True,
    fixed={"layer_norm_eps": EPSILON, "use_parallel_residual": True},
    names={
        "gpt_neox.embed_in": "embed",
        "gpt_neox.final_layer_norm": "final_norm",
        "lm_head": "logits",
        "embed_out": "logits",
        **_in_layers(
            {
                **NORMS,
                "attention.query_key_value": "attention.qkv",
                "attention.dense": "attention.out",
                "mlp.dense_h_to_4h": "ffn.up",
                "mlp.dense_4h_to_h": "ffn.down",
            },
            "gpt_neox.layers",
        ),
    },
    interleaved=True,
)
STABLELM = Family(
    model_type="stablelm",
    block="stablelm",
    config="StableLmConfig",
    sizes=HEADS,
    activations=GATE_ACTIVATIONS,
    layer=replace(GPT2_LAYER, ffn="swiglu"),
    bias=False,
    partly=True,
    fixed={"layer_norm_eps": EPSILON, "use_qkv_bias": False, "qk_layernorm": False, "use_parallel_residual": False},
    names=LLAMA.names,
)
# Export takes the first family of a block that converts back to the same model. Source: transformers' models of these
# types; before version 5, `lm_head` of gpt_neox is `embed_out`, and `rope_parameters` are `rope_theta` and
# `rope_scaling`.
FAMILIES: tuple[Family, ...] = (
    Family(
        model_type="gpt2",
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
        turns=False,
        fixed={
            "layer_norm_epsilon": EPSILON,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        names={
            "transformer.wte": "embed",
            "transformer.wpe": "position",
            "transformer.ln_f": "final_norm",
            "lm_head": "logits",
            **_in_layers(
                {
                    "ln_1": "norm1",
                    "attn.c_attn": "attention.qkv",
                    "attn.c_proj": "attention.out",
                    "ln_2": "norm2",
                    "mlp.c_fc": "ffn.up",
                    "mlp.c_proj": "ffn.down",
                },
                "transformer.h",
            ),
        },
        transposed=True,
    ),
    PYTHIA,
    replace(PYTHIA, block="neox", fixed={**PYTHIA.fixed, "use_parallel_residual": False}),
    LLAMA,
    replace(LLAMA, model_type="mistral", config="MistralConfig", biases={}),
    replace(LLAMA, model_type="smollm3", config="SmolLM3Config"),
    replace(
        LLAMA,
        model_type="granite",
        config="GraniteConfig",
        sizes={
            **GROUPED,
            "rms_norm_eps": "norm_epsilon",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "score_scale",
            "logits_scaling": Number("logit_scale", _inverse, _inverse),
        },
    ),
    replace(
        LLAMA,
        model_type="qwen3",
        block="qwen3",
        config="Qwen3Config",
        biases=ATTENTION_BIAS,
        names={**LLAMA.names, **_in_layers(HEAD_NORMS)},
    ),
    GEMMA,
    GEMMA2,
    replace(
        GEMMA2,
        model_type="gemma3_text",
        block="gemma3",
        config="Gemma3TextConfig",
        names={**GEMMA2.names, **_in_layers(HEAD_NORMS)},
    ),
    replace(
        LLAMA,
        model_type="olmo2",
        block="olmo2",
        config="Olmo2Config",
        layer=replace(LLAMA_LAYER, norm1="none", norm2="none"),
        biases=ATTENTION_BIAS,
        final_norm="rmsnorm",
        names=OUTSIDE
        | _in_layers(
            {name: ours for name, ours in AROUND.items() if name.startswith("post")} | HEAD_NORMS | PROJECTIONS | GATED
        ),
    ),
    replace(LLAMA, model_type="qwen2", block="qwen2", config="Qwen2Config", biases={}),
    replace(
        LLAMA,
        model_type="phi3",
        block="phi3",
        config="Phi3Config",
        biases={},
        partly=True,
        read_only={"full_attn_mod": 1, "interpolate_factor": 1},  # of Phi-4-mini
        names=OUTSIDE
        | _in_layers(
            {
                **NORMS,
                "self_attn.qkv_proj": "attention.qkv",
                "self_attn.o_proj": "attention.out",
                "mlp.gate_up_proj": ("ffn.gate", "ffn.up"),
                "mlp.down_proj": "ffn.down",
            }
        ),
    ),
    Family(
        model_type="starcoder2",
        block="starcoder2",
        config="Starcoder2Config",
        sizes=GROUPED,
        biases={"use_bias": (*ATTENTION, *FFN)},
        fixed={"norm_epsilon": EPSILON},
        read_only={"mlp_type": "default", "norm_type": "layer_norm"},
        names=OUTSIDE | _in_layers(NORMS | PROJECTIONS | {"mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down"}),
    ),
    STABLELM,
    replace(STABLELM, block="stablelm2", fixed={**STABLELM.fixed, "use_qkv_bias": True}),
    Family(
        model_type="opt",
        block="opt",
        config="OPTConfig",
        sizes={name: ours for name, ours in SIZES.items() if name != "intermediate_size"}
        | {"ffn_dim": "d_ff", "word_embed_proj_dim": "d_model"},
        activation="activation_function",
        biases={"enable_bias": (*ATTENTION, *FFN)},
        turns=False,
        fixed={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
        names={
            "model.decoder.embed_tokens": "embed",
            "model.decoder.embed_positions": "position",
            "model.decoder.final_layer_norm": "final_norm",
            "lm_head": "logits",
            **_in_layers(
                {
                    "self_attn_layer_norm": "norm1",
                    **PROJECTIONS,
                    "self_attn.out_proj": "attention.out",
                    "final_layer_norm": "norm2",
                    "fc1": "ffn.up",
                    "fc2": "ffn.down",
                },
                "model.decoder.layers",
            ),
        },
        first_position=2,
    ),
)
