"""Models of Llama's family in a `.gguf` file: settings and weights. Its tokenizer is `nas.conversion.gguf_tokenizer`'s.

Weights that are quantised are dequantised, by the functions of the package `gguf` (extra `gguf`): what comes out has
the errors of that quantisation, and is no longer small.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md for names of settings and tensors;
https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py (`LlamaModel.permute`), for the order of rows.
"""

from collections import Counter
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from costmodel.errors import UserError
from nas.conversion.checkpoint_memory import require_memory
from nas.conversion.gguf_tokenizer import tokenizer_of
from nas.conversion.pretrained import Pretrained
from nas.corpus.documents import GivenTokenizer
from search_spaces.architecture import Architecture
from search_spaces.checkpoints.gguf_head import FAMILIES, Settings, gguf_package, head_architecture, read_head
from search_spaces.lower import lower

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


def load_gguf(path: str) -> Pretrained:
    """The model in a file.

    Raises UserError if there is none, it is damaged, of another family, lacks a tensor, has one in a form that cannot
    be read, is larger than memory, has no tokenizer that can be read, or gguf is not installed.
    """
    settings, tensors = read_head(path)
    architecture, tokenizer = _checked(settings, tensors)
    forms = Counter(tensor.tensor_type.name for tensor in tensors.values())
    listed = ", ".join(f"{count} {name}" for name, count in forms.most_common())
    note = f"{path}: {listed} tensors, dequantised to single precision by gguf {metadata.version('gguf')}"
    return Pretrained(architecture, _weights(settings, architecture, tensors), tokenizer, notes=(note,))


def read_gguf_architecture(path: str) -> Architecture:
    """The architecture in a file. Raises UserError as `load_gguf` does, but for weights that are not finite."""
    return _checked(*read_head(path))[0]


def _checked(settings: Settings, tensors: Mapping[str, Any]) -> tuple[Architecture, GivenTokenizer]:
    """Architecture and tokenizer of a file that holds all that it should, as far as its head tells."""
    architecture, path = head_architecture(settings, tensors), settings.path
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
        return gguf_package().dequantize(values, tensor.tensor_type)
    except NotImplementedError:
        raise UserError(
            f"{path!r} must be in forms that gguf can dequantise, but {tensor.name!r} is {tensor.tensor_type.name}; "
            f"convert it."
        ) from None
