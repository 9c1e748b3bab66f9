"""Read the architecture, weights and tokenizer in a `.gguf` file.

The package `gguf` (extra `gguf`) dequantises the weights to single precision; the errors of quantisation remain.

Source: https://github.com/ggml-org/llama.cpp, conversion/, for the order of rows (`LlamaModel.permute`) and the form of
weights; src/llama-vocab.cpp for how each kind of tokenizer splits text.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, pre_tokenizers
from torch import Tensor

from costmodel.config.files import MOST_JSON, read_bytes, read_text
from costmodel.errors import UserError
from nas.conversion.huggingface import from_theirs, their_names
from nas.conversion.pretrained import Pretrained, require_memory
from nas.corpus.documents import GivenTokenizer
from nas.corpus.foreign_tokenizer import tokenizing
from nas.corpus.tokenizer import (
    END_OF_TEXT,
    GENERATION_FILE,
    KEPT_FILES,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    require_settings,
    template,
)
from search_spaces.architecture import Architecture
from search_spaces.checkpoints.checkpoint import gguf_package, read_config, read_foreign, read_head
from search_spaces.checkpoints.families import Family
from search_spaces.checkpoints.settings import architecture_of, family_of
from search_spaces.lower import lower

# families whose files have rotary pairs of adjacent features, not of features f and f + head_dim / 2
PAIRED = ("llama", "granite", "smollm3")
AS_GPT2 = ("gpt-2", "mpt", "olmo", "jais")  # values of `tokenizer.ggml.pre` that split text as GPT-2 does
BY_DIGIT = ("smollm", "starcoder", "refact", "command-r")  # values that do so after they split off each digit
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # name in transformers -> in GGUF
ENDS = ("eos", "eot", "eom")  # tokens that end a text, a turn and a message
BESIDE = f"put the model's {TOKENIZER_FILE} beside the file."
WHOLE_FIRST = ("llama3", "llama-v3", "llama-bpe")  # values that never split a piece of text that is one token


def load_gguf(path: str) -> Pretrained:
    """Load the model of a GGUF file, with the tokenizer.json in the same folder or, without one, the file's tokenizer.

    Raises UserError if the file is missing, damaged or of an unknown family, lacks a tensor or a readable tokenizer,
    does not fit into memory, or has a tensor that is unexpected, misshapen, not finite or of an unknown type, or if
    gguf or transformers is not installed.
    """
    family, architecture = read_gguf_settings(path)
    require_memory(architecture, path)
    tokenizer = _tokenizer(path)
    weights = _weights(path, family, architecture, lambda tensor: _dequantised(tensor, tensor.data, path))
    if bad := [name for name, value in weights.items() if not value.isfinite().all()]:
        raise UserError(f"{path!r} must hold finite numbers, but {bad[0]!r} has others.")
    forms = Counter(tensor.tensor_type.name for tensor in read_head(path)[1].values())
    listed = ", ".join(f"{count} {name}" for name, count in forms.most_common())
    note = f"{path}: {listed} tensors, dequantised to single precision by gguf {metadata.version('gguf')}"
    return Pretrained(architecture, weights, tokenizer, notes=(note,))


def read_gguf_settings(path: str) -> tuple[Family, Architecture]:
    """Return the family and the architecture of a GGUF file, from its metadata and the shapes of its tensors.

    Raises UserError as `load_gguf` does, except for numbers that are not finite, low memory and a damaged tokenizer.
    """
    config = read_config(path)
    family, architecture = family_of(config, path), architecture_of(config, path)

    def shaped(tensor: Any) -> Tensor:
        sizes = tuple(map(int, reversed(tensor.shape)))
        return _dequantised(tensor, tensor.data[:1], path).new_empty(1).expand(sizes)  # takes no memory

    _weights(path, family, architecture, shaped)
    if not Path(path).with_name(TOKENIZER_FILE).is_file():
        read_foreign(_what(path), partial(_require_known_kind, read_head(path)[0].values))
    return family, architecture


def _weights(path: str, family: Family, architecture: Architecture, read: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """Return the weights by node of the op graph, with a copy of a tied table. read: reads a tensor of the file.

    Raises UserError for a tensor that is missing, misshapen or unexpected.
    """
    (settings, tensors), gguf = read_head(path), gguf_package()
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    modules = gguf.get_tensor_name_map(kinds[settings.family], architecture.num_layers)
    stored: dict[str, str] = {}  # our name -> name in the file
    state: dict[str, Tensor] = {}
    for theirs, ours in their_names(family, architecture):
        module, _, suffix = theirs.rpartition(".")
        head = "token_embd" if architecture.tied_embeddings else "output"
        name = f"{head if ours[0].startswith('logits') else modules.get_name(module)}.{suffix}"
        stored |= dict.fromkeys(ours, name)
        if name in tensors:
            state[theirs] = read(tensors[name])
    plain = replace(family, gain_offset=0.0, transposed=False, interleaved=False)  # llama.cpp stores these as we do
    held = from_theirs(plain, architecture, state)
    weights: dict[str, Tensor] = {}
    for node in lower(architecture, architecture.context):
        for suffix, shape in node.op.weight_shapes.items():
            name = f"{node.name}.{suffix}"
            if name not in held:
                raise UserError(f"{path!r} must hold all weights of its settings, but lacks {stored[name]!r}.")
            if (value := held[name]).shape != shape:
                raise UserError(
                    f"{path!r} must hold {stored[name]!r} of shape {shape}, but it is {tuple(value.shape)}."
                )
            if settings.family in PAIRED and node.name.endswith((".attention.q", ".attention.k")):
                pairs = value.view(-1, architecture.head_dim // 2, 2, *shape[1:])
                value = pairs.transpose(1, 2).reshape(shape)
            shared = value.untyped_storage().nbytes() > value.nbytes  # two weights are packed in one tensor
            weights[name] = value.clone() if shared else value
    if unread := sorted(tensors.keys() - {stored[name] for name in weights}):
        raise UserError(f"{path!r} must hold the weights of its settings alone, but has {unread[0]!r} too.")
    return weights


def _dequantised(tensor: Any, rows: Any, path: str) -> Tensor:
    """Return rows of a tensor in single precision. Raises UserError if gguf cannot dequantise its type."""
    try:
        return torch.from_numpy(np.array(gguf_package().dequantize(rows, tensor.tensor_type), dtype=np.float32))
    except NotImplementedError:
        raise UserError(
            f"{path!r} must be in forms that gguf can dequantise, but {tensor.name!r} is {tensor.tensor_type.name}; "
            f"convert it."
        ) from None


def _tokenizer(path: str) -> GivenTokenizer:
    """Return the tokenizer.json next to a file, or else the tokenizer that transformers makes from the metadata."""
    values, beside = read_head(path)[0].values, Path(path).with_name(TOKENIZER_FILE)
    json_of = read_text(beside, MOST_JSON) if beside.is_file() else None
    load = partial(_from_metadata, path, values) if json_of is None else partial(Tokenizer.from_str, json_of)
    with tokenizing(f"the tokenizer of {path!r}"):
        tokenizer = read_foreign(_what(path), load)
    end_of_text = tokenizer.id_to_token(values.get("tokenizer.ggml.eos_token_id", 2**32 - 1)) or END_OF_TEXT
    for name in (TOKENIZER_CONFIG_FILE, GENERATION_FILE) if beside.is_file() else ():
        require_settings(beside.with_name(name))
    found = {file.name: read_bytes(file, MOST_JSON) for file in map(beside.with_name, KEPT_FILES) if file.is_file()}
    files = _files_from_metadata(tokenizer, values) | (found if beside.is_file() else {})
    return GivenTokenizer(
        name=Path(path).name, json=tokenizer.to_str(), end_of_text=end_of_text, files=tuple(files.items())
    )


def _files_from_metadata(tokenizer: Any, values: Mapping[str, Any]) -> dict[str, bytes]:
    """Return tokenizer_config.json and generation_config.json for transformers, made from a file's metadata."""
    given = {key: values.get(f"tokenizer.ggml.{key}_token_id", 2**32 - 1) for key in (*SPECIAL.values(), *ENDS)}
    ids = {key: id_ for key, id_ in given.items() if tokenizer.id_to_token(id_) is not None}
    settings = {f"{name}_token": tokenizer.id_to_token(ids[key]) for name, key in SPECIAL.items() if key in ids}
    if "tokenizer.chat_template" in values:
        settings["chat_template"] = values["tokenizer.chat_template"]
    generation = {f"{name}_token_id": ids[key] for name, key in SPECIAL.items() if key in ids and name != "unk"}
    if ends := list(dict.fromkeys(ids[key] for key in ENDS if key in ids)):
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return {TOKENIZER_CONFIG_FILE: json.dumps(settings).encode(), GENERATION_FILE: json.dumps(generation).encode()}


def _what(path: str) -> str:
    where = "beside" if Path(path).with_name(TOKENIZER_FILE).is_file() else "in"
    return f"the tokenizer {where} {path!r} must be one"


def _require_known_kind(values: Mapping[str, Any]) -> None:
    """Raise UserError unless the kind and pre-tokenisation of a file's own tokenizer are known."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS as SPLITS
    except ImportError:
        raise UserError(f"tokenizers of GGUF files need transformers 5.24; {BESIDE}") from None
    kind, cut = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    spaced = values.get("tokenizer.ggml.add_space_prefix", True) or "gemma" in values["general.architecture"]
    if not (spaced if kind == "llama" else kind == "gpt2" and cut in {*SPLITS, *AS_GPT2, *BY_DIGIT}):
        raise UserError(f"kind {kind!r}, cut as {cut!r}{'' if spaced else ' without a space'}, is not known; {BESIDE}")


def _from_metadata(path: str, values: Mapping[str, Any]) -> Any:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    kind, cut = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    architecture, described, rule = get_gguf_tokenizer(path)
    tokenizer, _ = convert_gguf_tokenizer(architecture, described)
    if kind == "gpt2" and cut in BY_DIGIT:
        digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.model.ignore_merges = cut in WHOLE_FIRST
    adds = {"bos_token_id": rule.get("add_bos_token", cut in WHOLE_FIRST), "eos_token_id": rule.get("add_eos_token")}
    before, after = ([described[name]] if is_added and name in described else [] for name, is_added in adds.items())
    if before or after:
        tokenizer.post_processor = template(tokenizer, before, after)
    return tokenizer
