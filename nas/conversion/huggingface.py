"""Models of transformers in and out: GPT-2, GPT-NeoX (Pythia), and, for every other placement, `huggingface_model`.

Needs the extra `hf`, which is imported when a function is called. Weights here are deployed weights, by node.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from costmodel.config.schema import decode
from costmodel.errors import UserError
from nas.conversion.pretrained import Pretrained
from nas.corpus.documents import GivenTokenizer
from nas.corpus.tokenizer import END_OF_TEXT
from search_spaces.architecture import Architecture, Ffn, Layer, canonical, gelu_form
from search_spaces.block import BLOCKS, BlockName

EXTRA = "this needs transformers; install it with pip install -e '.[hf]'."
OUR_TYPE = "private-inference-decoder"  # `model_type` of `huggingface_model`, which is imported only when needed
EPSILON = 1e-5  # of every LayerNorm, here and in GPT-2's and Pythia's configurations
ROTARY_BASE = 10_000
LINEAR_WEIGHTS = tuple(f".{linear}.weight" for linear in ("qkv", "out", "up", "down"))  # of a layer


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """Names and layout in a model of transformers of what a block of ours computes.

    config: their class. sizes: their settings to our dimensions. activation: their setting.
    fixed: values that our blocks have built in. read_only: the same, of settings that are not written.
    names: their modules to ours; `{}` is the layer.
    transposed: whether weights of a layer's linears are in_features x out_features.
    interleaved: whether the packed rows are heads x (query, key, value), not (query, key, value) x heads.
    """

    block: BlockName
    config: str
    sizes: Mapping[str, str]
    activation: str
    fixed: Mapping[str, Any]
    read_only: Mapping[str, Any]
    names: Mapping[str, str]
    transposed: bool
    interleaved: bool


PYTHIA_ROTARY = 1 / (BLOCKS["pythia"].rotary_share or 1)
# By `model_type`. Source: transformers' models.gpt2 and models.gpt_neox, whose lm_head is `embed_out` and whose
# `rope_parameters` are `rotary_pct` and `rotary_emb_base` before version 5.
FAMILIES: dict[str, _Family] = {
    "gpt2": _Family(
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
        read_only={},
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
        interleaved=False,
    ),
    "gpt_neox": _Family(
        block="pythia",
        config="GPTNeoXConfig",
        sizes={
            "vocab_size": "vocab_size",
            "max_position_embeddings": "context",
            "hidden_size": "d_model",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "intermediate_size": "d_ff",
        },
        activation="hidden_act",
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
        transposed=False,
        interleaved=True,
    ),
}
# Their activations: our FFN, and the form of its GELU.
ACTIVATIONS: dict[str, tuple[Ffn, str]] = {
    "gelu_new": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "gelu": ("gelu", "exact"),
    "relu": ("relu", "tanh"),
}


def load_pretrained(path: str) -> Pretrained:
    """The model in a folder of `save_pretrained`, or of an id on the hub.

    Raises UserError if there is none, the hub cannot be reached, its kind is unknown, its weights are incomplete, of
    other shapes, not floating point or not finite, or transformers is not installed.
    """
    transformers = _transformers()
    what = f"{path!r} must be a folder of save_pretrained or a model id on the Hugging Face hub"
    if os.path.exists(path) and not os.path.isfile(Path(path, "config.json")):
        raise UserError(f"{what}, but the folder has no config.json.")
    config = _read(what, lambda: transformers.AutoConfig.from_pretrained(path))
    ours = config.model_type == OUR_TYPE
    architecture = None if ours else _architecture(config, path)  # before a model of any size is made
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, info = _read(what, lambda: load(path, config=config, output_loading_info=True))
    if missing := sorted(info["missing_keys"]) + [str(key) for key in info["mismatched_keys"]]:
        raise UserError(f"{path!r} must hold all weights of its config.json, but lacks or misshapes {missing[0]}.")
    if bad := [name for name, value in model.state_dict().items() if not _is_finite(value)]:
        raise UserError(f"weights must be finite floating-point numbers, but {bad[0]!r} of {path!r} is not.")
    if architecture is None:
        architecture, weights = _decoded(config.architecture), model.decoder.state_dict()
    else:
        weights = _from_theirs(FAMILIES[config.model_type], architecture, model.state_dict())
    copies = {name: value.float().clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
    return Pretrained(architecture, copies, _tokenizer(path))


def _decoded(architecture: Any) -> Architecture:
    return decode(Architecture, architecture, "`architecture` of config.json")


def _tokenizer(path: str) -> GivenTokenizer | None:
    """The one beside the weights, if it is one that the package tokenizers can run."""
    try:
        theirs = _transformers().PreTrainedTokenizerFast.from_pretrained(path)
    except Exception:  # none there, or one in another form
        return None
    return GivenTokenizer(
        name=path, json=theirs.backend_tokenizer.to_str(), end_of_text=theirs.eos_token or END_OF_TEXT
    )


def _read(what: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:  # whatever a foreign file provokes is the user's bad input
        raise UserError(f"{what} that can be read, but: {' '.join(str(error).split()):.300}") from None


def to_transformers(architecture: Architecture, weights: Mapping[str, Tensor]) -> Any:
    """A model of transformers that computes the same: GPT-2 or GPT-NeoX where it is one, else our own class."""
    transformers = _transformers()
    from nas.conversion.huggingface_model import DecoderConfig, DecoderForCausalLM

    family = next((family for family in FAMILIES.values() if family.block == architecture.block), None)
    config = _plain_config(family, architecture) if family else None
    if family is None or config is None:
        block = architecture.block_facts
        facts = {"join": block.join, "rotary_share": block.rotary_share}
        model: Any = DecoderForCausalLM(DecoderConfig(architecture=canonical(architecture), block=facts))
        model.decoder.load_state_dict(weights)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
        expected = model.state_dict()
        theirs = _to_theirs(family, architecture, weights)
        model.load_state_dict({name: value for name, value in theirs.items() if name in expected})
    return model.eval()


def save_model(architecture: Architecture, weights: Mapping[str, Tensor], tokenizer: Path, target: Path) -> None:
    """`to_transformers` and its tokenizer, by their `save_pretrained`, into a folder.

    tokenizer: a tokenizer.json. Raises UserError if it is gone.
    """
    if not tokenizer.is_file():
        raise UserError(
            f"the tokenizer of the corpus must be in {tokenizer.parent}, but is gone; prepare the data anew."
        )
    to_transformers(architecture, weights).save_pretrained(target)
    ours = _transformers().PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer),
        eos_token=END_OF_TEXT,
        model_max_length=architecture.context,
        model_input_names=["input_ids", "attention_mask"],
    )
    ours.save_pretrained(target)


def _plain_config(family: _Family, architecture: Architecture) -> Any | None:
    """The configuration of theirs that computes the same; None if there is none."""
    activation, share = _plain_activation(architecture), architecture.block_facts.rotary_share
    if activation is None or (share is not None and architecture.head_dim % (2 * share)):
        return None
    return getattr(_transformers(), family.config)(
        **{theirs: getattr(architecture, ours) for theirs, ours in family.sizes.items()},
        **family.fixed,
        **{family.activation: activation},
        tie_word_embeddings=architecture.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )


def _plain_activation(architecture: Architecture) -> str | None:
    """Their name of the activation, if every layer is one of GPT-2's or Pythia's own; else None."""
    layer = architecture.layers[0]
    plain = (
        replace(
            architecture,
            layers=(Layer(norm1="layernorm", norm2="layernorm", ffn=layer.ffn),) * architecture.num_layers,
            final_norm="layernorm",
            bias=True,
            softmax="exact",
            folded=False,
        )
        if layer.ffn != "none"
        else None
    )
    if architecture != plain:
        return None
    form = gelu_form(architecture, layer)
    kind = (layer.ffn, "tanh") if form is None else ("gelu", form)
    return next((name for name, theirs in ACTIVATIONS.items() if theirs == kind), None)


def _architecture(config: Any, path: str) -> Architecture:
    """Raises UserError, naming what, for a model that is not exactly what a block can be."""
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"{path!r} must be a model of type {known} or an export of ours, but is {config.model_type!r}.")
    family, settings = FAMILIES[config.model_type], config.to_dict()
    for name, value in {**family.fixed, **family.read_only}.items():
        if settings.get(name, value) != value:
            raise UserError(
                f"`{name}` of {path!r} must be {value!r}, but is {settings[name]!r}; it cannot be imported."
            )
    activation = getattr(config, family.activation)
    if activation not in ACTIVATIONS:
        raise UserError(f"the activation of {path!r} must be one of {', '.join(ACTIVATIONS)}, but is {activation!r}.")
    ffn, form = ACTIVATIONS[activation]
    sizes = {ours: getattr(config, theirs) for theirs, ours in family.sizes.items()}
    sizes["d_ff"] = sizes["d_ff"] or 4 * sizes["d_model"]  # GPT-2's is None where it is that
    return Architecture(
        block=family.block,
        final_norm="layernorm",
        tied_embeddings=config.tie_word_embeddings,
        gelu="exact" if form == "exact" else "tanh",
        layers=(Layer(norm1="layernorm", norm2="layernorm", ffn=ffn),) * sizes.pop("num_layers"),
        **sizes,
    )


def _names(family: _Family, architecture: Architecture) -> Iterator[tuple[str, str]]:
    """(theirs, ours) of every weight that there may be."""
    for theirs, ours in family.names.items():
        for index in range(architecture.num_layers if "{}" in theirs else 1):
            for suffix in ("weight", "bias"):
                yield f"{theirs.format(index)}.{suffix}", f"{ours.format(index)}.{suffix}"


def _from_theirs(family: _Family, architecture: Architecture, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names, heads = _names(family, architecture), architecture.num_heads
    return {ours: _laid_out(family, ours, state[theirs], heads, 3) for theirs, ours in names if theirs in state}


def _to_theirs(family: _Family, architecture: Architecture, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names, heads = _names(family, architecture), architecture.num_heads
    return {theirs: _laid_out(family, ours, weights[ours], 3, heads) for theirs, ours in names if ours in weights}


def _laid_out(family: _Family, name: str, value: Tensor, outer: int, inner: int) -> Tensor:
    """A weight of ours as theirs, or back; name: ours. No family both transposes and interleaves."""
    if family.interleaved and ".qkv." in name:
        value = _swapped(value, outer, inner)
    return value.T if family.transposed and name.endswith(LINEAR_WEIGHTS) else value


def _swapped(packed: Tensor, outer: int, inner: int) -> Tensor:
    """Rows of outer x inner x head_dim as inner x outer x head_dim."""
    return packed.view(outer, inner, -1, *packed.shape[1:]).transpose(0, 1).reshape(packed.shape)


def _is_finite(value: Tensor) -> bool:
    return value.is_floating_point() and bool(value.isfinite().all())


def _transformers() -> Any:
    try:
        import transformers

        from nas.conversion.huggingface_model import DecoderConfig, DecoderForCausalLM
    except ImportError:
        raise UserError(EXTRA) from None
    library: Any = transformers
    library.logging.set_verbosity_error()  # what matters is raised
    library.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    transformers.AutoConfig.register(OUR_TYPE, DecoderConfig, exist_ok=True)
    transformers.AutoModelForCausalLM.register(
        DecoderConfig,
        DecoderForCausalLM,
        exist_ok=True,
    )
    return library
