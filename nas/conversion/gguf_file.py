"""Models of Llama's family in a `.gguf` file: settings and weights. Its tokenizer is `nas.conversion.gguf_tokenizer`'s.

Weights that are quantised are dequantised, by the functions of the package `gguf` (extra `gguf`): what comes out has
the errors of that quantisation, and is no longer small.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md for names of settings and tensors;
https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py (`LlamaModel.permute`), for the order of rows.
"""

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from costmodel.errors import UserError
from costmodel.ops import ROTARY_BASE
from nas.conversion.checkpoint_memory import require_memory
from nas.conversion.gguf_tokenizer import tokenizer_of
from nas.conversion.huggingface_settings import imported
from nas.conversion.pretrained import Pretrained
from nas.corpus.documents import GivenTokenizer
from search_spaces.architecture import Architecture
from search_spaces.bases import LLAMA_LAYER
from search_spaces.block import BlockName
from search_spaces.lower import lower

EXTRA = "this needs the package gguf; install it with pip install -e '.[gguf]'."


class _Family(NamedTuple):
    """pairs_neighbours: whether features f, f + 1 of queries and keys turn together, not halves."""

    block: BlockName
    pairs_neighbours: bool


# by `general.architecture`, which calls these as we call their blocks
FAMILIES: dict[str, _Family] = {
    family.block: family
    for family in (_Family("llama", pairs_neighbours=True), _Family("qwen2", pairs_neighbours=False))
}
NAMES = {
    "embed": "token_embd",
    "layers.{}.norm1": "blk.{}.attn_norm",
    "layers.{}.attention.q": "blk.{}.attn_q",
    "layers.{}.attention.k": "blk.{}.attn_k",
    "layers.{}.attention.v": "blk.{}.attn_v",
    "layers.{}.attention.out": "blk.{}.attn_output",
    "layers.{}.norm2": "blk.{}.ffn_norm",
    "layers.{}.ffn.gate": "blk.{}.ffn_gate",
    "layers.{}.ffn.up": "blk.{}.ffn_up",
    "layers.{}.ffn.down": "blk.{}.ffn_down",
    "final_norm": "output_norm",
    "logits": "output",
}


class Settings(NamedTuple):
    """The metadata of a file."""

    path: str
    values: Mapping[str, Any]

    @property
    def family(self) -> str:
        return str(self.values.get("general.architecture"))

    def own(self, name: str, default: Any = None) -> Any:
        """A setting of the family's own. Raises UserError if it is not there and has no default."""
        value = self.values.get(f"{self.family}.{name}", default)
        if value is None:
            raise UserError(f"{self.path!r} must be a whole GGUF file, but lacks the setting '{self.family}.{name}'.")
        return value


def is_gguf(path: str) -> bool:
    return path.endswith(".gguf")


def load_gguf(path: str) -> Pretrained:
    """The model in a file.

    Raises UserError if there is none, it is damaged, of another family, lacks a tensor, has one in a form that cannot
    be read, is larger than memory, has no tokenizer that can be read, or gguf is not installed.
    """
    settings, tensors = _read(path)
    architecture, tokenizer = _checked(settings, tensors)
    forms = Counter(tensor.tensor_type.name for tensor in tensors.values())
    listed = ", ".join(f"{count} {name}" for name, count in forms.most_common())
    note = f"{path}: {listed} tensors, dequantised to single precision by gguf {metadata.version('gguf')}"
    return Pretrained(architecture, _weights(settings, architecture, tensors), tokenizer, notes=(note,))


def read_gguf_architecture(path: str) -> Architecture:
    """The architecture in a file. Raises UserError as `load_gguf` does, but for weights that are not finite."""
    return _checked(*_read(path))[0]


def _checked(settings: Settings, tensors: Mapping[str, Any]) -> tuple[Architecture, GivenTokenizer]:
    """Architecture and tokenizer of a file that holds all that it should, as far as its head tells."""
    architecture, path = _architecture(settings, tensors), settings.path
    read = set()
    for node in lower(architecture, 1):
        for suffix, shape in node.op.weight_shapes.items():
            read.add(name := _their_name(node.name, suffix, tied=architecture.tied_embeddings))
            if name not in tensors:
                raise UserError(f"{path!r} must hold all weights of its settings, but lacks {name!r}.")
            if (theirs := tuple(map(int, reversed(tensors[name].shape)))) != shape:
                raise UserError(f"{path!r} must hold {name!r} of shape {shape}, but it is {theirs}.")
            _dequantised(tensors[name].data[:1], tensors[name], path)
    if unread := sorted(tensors.keys() - read):
        raise UserError(f"{path!r} must hold the weights of its settings alone, but has {unread[0]!r} too.")
    require_memory(architecture, path)
    return architecture, tokenizer_of(settings.values, Path(path))


def _architecture(settings: Settings, tensors: Mapping[str, Any]) -> Architecture:
    """Raises UserError, naming what, for a model that is not exactly what a block can be."""
    path, setting = settings.path, settings.own
    if settings.family not in FAMILIES:
        raise UserError(f"{path!r} must be a model of {' or '.join(FAMILIES)}, but is of {settings.family!r}.")
    if "token_embd.weight" not in tensors:
        raise UserError(f"{path!r} must hold all weights of its settings, but lacks 'token_embd.weight'.")
    heads, d_model = setting("attention.head_count"), setting("embedding_length")
    if not heads or (setting("attention.key_length", 0) == 0 and d_model % heads):
        raise UserError(f"`attention.head_count` of {path!r} must divide the width, {d_model}, but is {heads}.")
    head_size = setting("attention.key_length", d_model // heads)
    usual = {
        "rope.dimension_count": head_size,
        "rope.scaling.type": "none",
        "attention.value_length": head_size,
        "expert_count": 0,
    }
    if setting("attention.sliding_window", 0) < setting("context_length"):  # a wider one hides no position
        usual["attention.sliding_window"] = 0
    for name, value in usual.items():
        if (given := setting(name, value)) != value:
            raise UserError(f"`{name}` of {path!r} must be {value!r}, but is {given!r}; it cannot be imported.")
    factor = setting("rope.scaling.factor", setting("rope.scale_linear", 0))  # 0 stands for none
    if factor not in (0, 1) and setting("rope.scaling.type", "linear") != "none":
        raise UserError(
            f"`rope.scaling.factor` of {path!r} must be 1 where no type of scaling is given, since it is linear then, "
            f"but is {factor:g}; it cannot be imported."
        )
    return imported(
        path,
        LLAMA_LAYER,
        num_layers=setting("block_count"),
        block=FAMILIES[settings.family].block,
        num_heads=heads,
        num_kv_heads=setting("attention.head_count_kv", heads),
        head_size=head_size,
        d_model=d_model,
        d_ff=setting("feed_forward_length"),
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        context=setting("context_length"),
        bias=False,
        tied_embeddings="output.weight" not in tensors,
        rotary_base=_decimal(setting("rope.freq_base", ROTARY_BASE)),
        norm_epsilon=_decimal(setting("attention.layer_norm_rms_epsilon")),
    )


def _decimal(number: float) -> float:
    """A number of single precision as it was written: 1e-5, not 9.99999975e-6."""
    return float(str(np.float32(number)))


def _weights(settings: Settings, architecture: Architecture, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights by node of the op graph, in single precision, a tied table written out."""
    weights: dict[str, Tensor] = {}
    for node in lower(architecture, 1):
        for suffix in node.op.weight_shapes:
            theirs = _their_name(node.name, suffix, tied=architecture.tied_embeddings)
            values = _dequantised(tensors[theirs].data, tensors[theirs], settings.path)
            if not np.isfinite(values).all():
                raise UserError(f"{settings.path!r} must hold finite numbers, but {theirs!r} has others.")
            value = torch.from_numpy(np.array(values, dtype=np.float32))
            if FAMILIES[settings.family].pairs_neighbours and node.name.endswith((".attention.q", ".attention.k")):
                pairs = value.view(-1, architecture.head_dim // 2, 2, *value.shape[1:])
                value = pairs.transpose(1, 2).reshape(value.shape)
            weights[f"{node.name}.{suffix}"] = value
    return weights


def _their_name(node: str, suffix: str, *, tied: bool) -> str:
    place, _, part = node.removeprefix("layers.").partition(".")
    if node.startswith("layers."):
        return f"{NAMES[f'layers.{{}}.{part}'].format(place)}.{suffix}"
    return f"{NAMES['embed' if tied and node == 'logits' else node]}.{suffix}"


def _dequantised(values: Any, tensor: Any, path: str) -> Any:
    """Rows of a tensor in single precision. Raises UserError if they are in a form that cannot be read."""
    try:
        return _gguf().dequantize(values, tensor.tensor_type)
    except NotImplementedError:
        raise UserError(
            f"{path!r} must be in forms that gguf can dequantise, but {tensor.name!r} is {tensor.tensor_type.name}; "
            f"convert it."
        ) from None


def _read(path: str) -> tuple[Settings, dict[str, Any]]:
    """Settings and tensors by name."""
    if not Path(path).is_file():
        raise UserError(f"{path!r} must be a GGUF file, but there is none.")
    return _read_at(path, Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=1)  # a large vocabulary takes seconds
def _read_at(path: str, modified_ns: int) -> tuple[Settings, dict[str, Any]]:
    try:
        reader = _gguf().GGUFReader(path)
        settings = Settings(path, {name: field.contents() for name, field in reader.fields.items()})
        return settings, {tensor.name: tensor for tensor in reader.tensors}
    except UserError:
        raise
    except Exception as error:  # whatever a foreign file provokes is the user's bad input
        reason = f"{error!s:.200}".rstrip(".")
        raise UserError(f"{path!r} must be a whole GGUF file, but: {reason}; get it again, or convert it.") from None


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise UserError(EXTRA) from None
    return gguf
