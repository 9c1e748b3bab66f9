"""Read and write models of transformers: of a known family or, failing that, of our class in `huggingface_model`.

This needs the extra `hf`, which is imported only when a function needs it. "Our" weights are in deployed form and named
`<node>.<suffix>`, by node of the op graph (`nas.model.weights`); "their" names are those of transformers.
"""

import ast
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from costmodel.config.files import MOST_JSON, MOST_WEIGHTS, decode, open_file, read_bytes, read_json
from costmodel.errors import UserError
from nas.conversion.pretrained import Pretrained, is_sound, require_memory
from nas.corpus.documents import GivenTokenizer
from nas.corpus.foreign_tokenizer import tokenizing
from nas.corpus.tokenizer import (
    END_OF_TEXT,
    GENERATION_FILE,
    KEPT_FILES,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    end_ids,
    kept_tokenizer,
    write_tokenizer,
)
from nas.model.settings import settings_of
from search_spaces.architecture import Architecture, canonical
from search_spaces.checkpoints.checkpoint import (
    CONFIG_FILE,
    OUR_TYPE,
    read_config,
    read_foreign,
    transformers_library,
    what_is_asked,
)
from search_spaces.checkpoints.families import Family
from search_spaces.checkpoints.settings import architecture_of, family_of, plain_settings

CARRIED = (
    *("costmodel.errors", "costmodel.ops.rotary", "nas.attention.reference", "nas.model.mpc_friendly"),
    *("nas.model.self_attention", "nas.model.layers", "nas.conversion.huggingface_model"),
)  # modules in an export's code, each after those that it imports
WRAPPED = {  # prefixes of names of weights, with remedies
    "_orig_mod.": "save the model from before torch.compile",
    "module.": "save the `module` of the parallel model",
    "base_model.": "save it merged, by merge_and_unload of PEFT",
}
# Texts in which tokenizers differ: spaces, lines, digits, cases, decomposed letters, other scripts and no text at all.
PROBES = (
    "",
    "a",
    "  Two  words \n\n\tand 12345, don't!\n",
    "U\u0308nicode \u00dc\u65e5\u672c \U0001f600",
    "\n def f(x):\r\n",
)
FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of the types of weights that are read
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
LINEAR_WEIGHTS = tuple(f".{linear}.weight" for linear in ("qkv", "out", "up", "down"))  # of a layer


def load_pretrained(path: str) -> Pretrained:
    """Load a model of transformers from a folder of `save_pretrained`, or by its id on the hub.

    Raises UserError if there is none, the hub cannot be reached, its family is unknown, transformers is not installed,
    a file cannot be read, or the weights are incomplete, of wrong shapes, not floating point of 16 bits or more, not
    finite or larger than memory.
    """
    config, architecture = read_pretrained_config(path)
    require_memory(architecture, path)  # before a model of any size is made
    _require_files_of_its_own(path)
    load = _transformers().AutoModelForCausalLM.from_pretrained
    model, info = read_foreign(
        what_is_asked(path),
        lambda: load(
            path,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # named below
            trust_remote_code=False,
        ),
    )
    if missing := sorted(info["missing_keys"]) + [
        f"{name}, of shape {list(theirs)} instead of {list(ours)}" for name, theirs, ours in info["mismatched_keys"]
    ]:
        wrapped = [prefix for prefix in WRAPPED if any(key.startswith(prefix) for key in info["unexpected_keys"])]
        why = f"; names begin with {wrapped[0]!r}, so {WRAPPED[wrapped[0]]}" if wrapped else ""
        raise UserError(f"{path!r} must hold all weights of its config.json, but lacks or misshapes {missing[0]}{why}.")
    state = model.state_dict()
    if bad := [name for name, value in state.items() if not is_sound(value)]:
        raise UserError(f"weights must be finite floating-point numbers, but {bad[0]!r} of {path!r} is not.")
    if config.model_type == OUR_TYPE:
        weights = model.decoder.state_dict()
    else:
        head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        if architecture.tied_embeddings and not head.equal(table):  # which transformers does not tie either
            architecture = replace(architecture, tied_embeddings=False)
        weights = from_theirs(family_of(config, path), architecture, state)
    copies = {name: value.float().clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
    return Pretrained(architecture, copies, _tokenizer(path, config))


def _require_files_of_its_own(path: str) -> None:
    """Raise UserError if an index names a weight file outside the folder, or the type of a weight is not in FLOATS.

    transformers would convert integers, or 8-bit numbers without their scales, to single precision.
    """
    for file in Path(path).glob("*.safetensors"):
        open_file(file, MOST_WEIGHTS).close()
        with read_foreign(what_is_asked(path), partial(safe_open, file, framework="pt")) as held:
            kinds = {name: held.get_slice(name).get_dtype() for name in held.keys() if name.endswith(".weight")}  # noqa: SIM118
        if other := [name for name, kind in kinds.items() if kind not in FLOATS]:
            raise UserError(f"weights must be finite floating-point numbers, but {other[0]!r} of {path!r} is not.")
    for index in Path(path).glob("*.index.json"):
        data = read_json(index)
        files = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(files, dict) or any(not isinstance(n, str) or Path(n).name != n for n in files.values()):
            raise UserError(f"`weight_map` of {index} must map weights to files beside it; get the checkpoint again.")


def read_pretrained_config(path: str) -> tuple[Any, Architecture]:
    """Return the transformers configuration and the architecture of a model, without its weights.

    Raises UserError as `load_pretrained` does, except for faults of weights and tokenizer.
    """
    _transformers()
    config = read_config(path)
    if config.model_type == OUR_TYPE:
        architecture = decode(Architecture, config.architecture, "`architecture` of config.json")
    else:
        architecture = architecture_of(config, path)
    return config, architecture


def _tokenizer(path: str, config: Any) -> GivenTokenizer | None:
    """Return the tokenizer that comes with the weights; None if there is none that the package tokenizers can run.

    It converts texts as AutoTokenizer does, whose class may override what tokenizer.json says. Raises UserError if a
    tokenizer.json cannot be read.
    """
    transformers, theirs, reason = _transformers(), None, None
    try:
        with tokenizing(f"the tokenizer of {path!r}"):
            theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
    except UserError as error:
        reason = " ".join(str(error).partition("but: ")[2].split())
    with suppress(UserError), tokenizing(f"the tokenizer of {path!r}"):
        auto = transformers.AutoTokenizer.from_pretrained(path, config=config, trust_remote_code=False)
        is_whole = auto.backend_tokenizer.get_vocab_size() > len(auto.all_special_tokens)
        if is_whole and (theirs is None or any(theirs(text).input_ids != auto(text).input_ids for text in PROBES)):
            theirs = auto
    if theirs is None:
        if not Path(path, TOKENIZER_FILE).is_file():  # there is none, or one in another form
            return None
        raise UserError(f"{path!r} must have a {TOKENIZER_FILE} that can be read, but: {reason:.200}")
    tokenizer = theirs.backend_tokenizer
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")}
    found = {name: transformers.utils.cached_file(path, name, **quiet) for name in KEPT_FILES}
    files = {name: read_bytes(Path(file), MOST_JSON) for name, file in found.items() if file is not None}
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if GENERATION_FILE not in files:
        ids = {name: getattr(config, name, None) for name in SPECIAL}
        files[GENERATION_FILE] = json.dumps({name: id_ for name, id_ in ids.items() if id_ is not None}).encode()
    what = f"{GENERATION_FILE} of {path!r} must be settings"
    ends = read_foreign(what, lambda: end_ids(json.loads(files[GENERATION_FILE]))) + end_ids(config.to_dict())
    end = theirs.eos_token or next(filter(None, map(tokenizer.id_to_token, ends)), END_OF_TEXT)
    name = Path(path).resolve().name if os.path.exists(path) else path  # of a folder, or an id on the hub
    return GivenTokenizer(name=name, json=tokenizer.to_str(), end_of_text=end, files=tuple(files.items()))


def to_transformers(architecture: Architecture, weights: Mapping[str, Tensor]) -> Any:
    """Return a model of transformers in evaluation mode: of a known family if one fits, else a `DecoderForCausalLM`."""
    transformers = _transformers()
    from nas.conversion.huggingface_model import DecoderConfig, DecoderForCausalLM

    plain = plain_settings(architecture, transformers)
    if plain is None:
        made = {"architecture": canonical(architecture), "modules": settings_of(architecture)}
        model: Any = DecoderForCausalLM(DecoderConfig(**made))
        model.decoder.load_state_dict(weights)
    else:
        family, settings = plain
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, family.config)(**settings))
        expected = model.state_dict()
        theirs = to_theirs(family, architecture, weights)
        model.load_state_dict({name: value for name, value in theirs.items() if name in expected})
    return model.eval()


def save_model(architecture: Architecture, weights: Mapping[str, Tensor], tokenizer: Path, target: Path) -> None:
    """Save the model of `to_transformers` and its tokenizer in `target`, for versions 4 and 5 of transformers.

    tokenizer: folder with the files of the tokenizer. Raises UserError if its tokenizer.json is gone, or its
    tokenizer_config.json is damaged.
    """
    if not (tokenizer / TOKENIZER_FILE).is_file():
        raise UserError(f"the tokenizer of the corpus must be in {tokenizer}, but is gone; prepare the data anew.")
    kept, model = kept_tokenizer(tokenizer, ""), to_transformers(architecture, weights)
    files, ids = dict(kept.files), Tokenizer.from_str(kept.json).token_to_id
    settings = json.loads(files.get(TOKENIZER_CONFIG_FILE, b"{}"))
    special = {f"{name}_id": ids(_content(settings.get(name))) for name in ("bos_token", "pad_token")}
    special |= {"eos_token_id": ids(kept.end_of_text), **json.loads(files.get(GENERATION_FILE, b"{}"))}
    for name in SPECIAL:
        if special.get(name) is not None:
            setattr(model.config, name, special[name])
            setattr(model.generation_config, name, special[name])
    model.save_pretrained(target)
    if (code := target / "huggingface_model.py").exists():
        code.write_text(exported_code())
    longest = min(architecture.context, settings.get("model_max_length") or architecture.context)
    if settings.get("tokenizer_class") in (None, "TokenizersBackend"):  # its name in version 5 alone
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(extra := settings.pop("extra_special_tokens", None), list):
        settings.setdefault("additional_special_tokens", extra)
    settings = {"model_input_names": ["input_ids", "attention_mask"], **settings, "model_max_length": longest}
    files[TOKENIZER_CONFIG_FILE] = json.dumps(settings, indent=1).encode()
    write_tokenizer(target, kept.json, kept.end_of_text, files.items())
    config = json.loads((target / CONFIG_FILE).read_text(encoding="utf-8"))
    (target / CONFIG_FILE).write_text(json.dumps(config | _before_5(config), indent=2) + "\n")


def exported_code() -> str:
    """Return the code of an export: the modules of `CARRIED` in one file, without their imports of each other.

    A constant that they import from a module of this project outside `CARRIED` is defined by its value.
    """
    parts = []
    for name in CARRIED:
        source = inspect.getsource(import_module(name))
        lines = source.splitlines()
        for node in reversed(ast.parse(source).body):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("costmodel", "nas")):
                known = () if node.module in CARRIED else [alias.name for alias in node.names]
                values = [getattr(import_module(str(node.module)), constant) for constant in known]
                lines[node.lineno - 1 : node.end_lineno] = map("{} = {!r}".format, known, values)
        parts.append("\n".join(lines))
    return "\n\n\n".join(parts) + "\n"


def _content(token: Any) -> str:
    """Return a special token of a configuration, where it may be a mapping; empty if there is none."""
    return str(token["content"]) if isinstance(token, dict) else str(token or "")


def _before_5(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a config of transformers 5 under their names in version 4; empty without any."""
    if not (rope := config.get("rope_parameters")):
        return {}
    main, local = rope.get("full_attention", rope), rope.get("sliding_attention")
    packed = {name: main[name] for name in ("rope_theta", "partial_rotary_factor") if name in main}
    scaling = {name: value for name, value in main.items() if name not in packed}
    names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}  # of GPT-NeoX
    own = {names[name]: value for name, value in packed.items()} if config["model_type"] == "gpt_neox" else packed
    own |= {} if local is None else {"rope_local_base_freq": local["rope_theta"]}
    return own | {"rope_scaling": None if main.get("rope_type", "default") == "default" else scaling}


def _transformers() -> Any:
    """Return the library with our own class registered."""
    library = transformers_library()
    from nas.conversion.huggingface_model import DecoderConfig, DecoderForCausalLM

    library.AutoConfig.register(OUR_TYPE, DecoderConfig, exist_ok=True)
    library.AutoModelForCausalLM.register(DecoderConfig, DecoderForCausalLM, exist_ok=True)
    return library


def from_theirs(family: Family, architecture: Architecture, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our weights, by our names. state: weights of transformers, by their names; what it lacks is left out."""
    weights: dict[str, Tensor] = {}
    for theirs, ours in their_names(family, architecture):
        if theirs in state:
            parts = state[theirs].chunk(len(ours))  # several of our weights are stacked in one of theirs
            weights |= {
                name: _laid_out(family, name, part, architecture.num_heads, 3)
                for name, part in zip(ours, parts, strict=True)
            }
    if family.gain_offset:
        # in single precision: a gain rounded to bfloat16 is off by up to 0.4 %
        weights |= {name: gain.float() + family.gain_offset for name, gain in weights.items() if _is_gain(name)}
    if family.first_position:
        weights["position.weight"] = weights["position.weight"][family.first_position :]
    return weights


def to_theirs(family: Family, architecture: Architecture, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of transformers, by their names. weights: ours, by our names.

    Rows of their position table before our first position are 0.
    """
    weights = {name: value - family.gain_offset if _is_gain(name) else value for name, value in weights.items()}
    state = {
        theirs: torch.cat([_laid_out(family, name, weights[name], 3, architecture.num_heads) for name in ours])
        for theirs, ours in their_names(family, architecture)
        if ours[0] in weights
    }
    if family.first_position:
        (name,) = (theirs for theirs, ours in family.names.items() if ours == "position")
        table = state[f"{name}.weight"]
        state[f"{name}.weight"] = torch.cat((table.new_zeros(family.first_position, table.shape[1]), table))
    return state


def _is_gain(name: str) -> bool:
    return name.endswith(("norm.weight", "norm1.weight", "norm2.weight"))


def their_names(family: Family, architecture: Architecture) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each weight that transformers may have, and the names of our weights that are stacked in it."""
    for theirs, modules in family.names.items():
        ours = (modules,) if isinstance(modules, str) else modules
        for index in range(architecture.num_layers if "{}" in theirs else 1):
            for suffix in ("weight", "bias"):
                yield f"{theirs.format(index)}.{suffix}", tuple(f"{name.format(index)}.{suffix}" for name in ours)


def _laid_out(family: Family, name: str, value: Tensor, outer: int, inner: int) -> Tensor:
    """Convert the layout of one weight, to or from theirs. name: ours. No family both transposes and interleaves."""
    if family.interleaved and ".qkv." in name:  # rows of outer x inner x head_dim as inner x outer x head_dim
        value = value.view(outer, inner, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
    return value.T if family.transposed and name.endswith(LINEAR_WEIGHTS) else value
