"""Reads the settings of a checkpoint: a folder of `save_pretrained`, its config.json, an id on the hub or a GGUF file.

Only settings are read, and of a GGUF file also the names and shapes of tensors. This needs the extra `hf`, and `gguf`
for GGUF files. Transformers' `from_pretrained(gguf_file=...)` is not used, because it ignores the rotary scaling, caps,
windows and size of heads that a file states.

Source for GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md for names of settings; https://github.com/
ggml-org/llama.cpp, `set_gguf_parameters` of each family in conversion/ for what is written, src/models/ for what is
left out.
"""

import logging
import os
import struct
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from costmodel.config.files import decode, read_json
from costmodel.errors import UserError
from costmodel.ops import ROTARY_BASE
from search_spaces.architecture import Architecture
from search_spaces.checkpoints.families import FAMILIES, Number
from search_spaces.checkpoints.known_settings import require_sound
from search_spaces.checkpoints.settings import NoBlockError, architecture_of

LENGTH = struct.Struct("<Q")  # number of bytes of a text, before the text in a GGUF file
WINDOWED = {"llama": "mistral"}  # type in GGUF -> type in transformers if the model has a window
TYPES = {"gptneox": "gpt_neox", "gemma3": "gemma3_text"}  # type in GGUF -> type in transformers, where they differ
KEYS = {  # field of `Architecture` -> setting of a GGUF file, without the name of the family before it
    "context": "context_length",
    "d_model": "embedding_length",
    "d_ff": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_size": "attention.key_length",
    "norm_epsilon": "attention.layer_norm_rms_epsilon",
    "embedding_scale": "embedding_scale",
    "residual_scale": "residual_scale",
    "score_scale": "attention.scale",
    "logit_scale": "logit_scale",
    "score_cap": "attn_logit_softcapping",
    "logit_cap": "final_logit_softcapping",
}
BY_FAMILY = ("embedding_scale", "residual_scale", "logit_scale", "score_cap", "logit_cap")  # family's if file lacks it
LARGEST_GEMMAS = (46, 62)  # layers of the 27B Gemmas, which divide scores by sqrt(d_model / heads), not sqrt(head size)


class Settings(NamedTuple):
    """The metadata of the GGUF file at `path`, without arrays. values: full name (`llama.block_count`) -> value."""

    path: str
    values: Mapping[str, Any]

    @property
    def family(self) -> str:
        return str(self.values.get("general.architecture"))

    def own(self, name: str, default: Any = None) -> Any:
        """Return the value of the setting `FAMILY.name`, or `default` if the file lacks it.

        Raises UserError if the setting is missing and `default` is None, or if it is text and `default` is not.
        """
        value = self.values.get(f"{self.family}.{name}", default)
        if value is None:
            raise UserError(f"{self.path!r} must be a whole GGUF file, but lacks the setting '{self.family}.{name}'.")
        if isinstance(value, str) and not isinstance(default, str):
            raise UserError(f"`{self.family}.{name}` of {self.path!r} must be a number, but is {value!r:.40}.")
        # of single precision, as it was written: 1e-5, not 9.99999975e-6
        return float(str(np.float32(value))) if isinstance(value, float) else value


def is_gguf(path: str) -> bool:
    return path.endswith(".gguf")


def read_head(path: str) -> tuple[Settings, dict[str, Any]]:
    """Return the settings of a GGUF file, and its tensors (objects of the package gguf) by name.

    Raises UserError if the file is missing, damaged or one of several parts, or the package is not installed.
    """
    if not Path(path).is_file():
        raise UserError(f"{path!r} must be a GGUF file, but there is none.")
    settings, tensors = _read_at(path, Path(path).stat().st_mtime_ns)
    if (parts := settings.values.get("split.count", 1)) not in (0, 1):
        raise UserError(
            f"{path!r} must be a whole model, but is one of {parts!r:.20} parts; join them: llama-gguf-split --merge."
        )
    return settings, tensors


@lru_cache(maxsize=1)
def _read_at(path: str, modified_ns: int) -> tuple[Settings, dict[str, Any]]:
    try:
        reader = _reader(path)
        scalars = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
        return Settings(path, scalars), {tensor.name: tensor for tensor in reader.tensors}
    except UserError:
        raise
    except Exception as error:  # whatever a foreign file provokes is the user's bad input
        reason = f"{error!s:.200}".rstrip(".")
        raise UserError(f"{path!r} must be a whole GGUF file, but: {reason}; get it again, or convert it.") from None


def _reader(path: str) -> Any:
    """Return gguf's reader of a file. It passes over arrays, since a vocabulary of 262,144 tokens would take 20 s."""
    gguf = gguf_package()

    class Reader(gguf.GGUFReader):  # type: ignore[misc, name-defined]
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != gguf.GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = (int(self._get(at, size)[0]) for at, size in ((orig_offs, "u4"), (orig_offs + 4, "u8")))
            at = orig_offs + 12  # behind kind and count
            if count > len(self.data) - at:
                raise ValueError(f"an array has {count} entries, more than the file has bytes")
            if kind == gguf.GGUFValueType.STRING:
                for _ in range(count):
                    at += 8 + LENGTH.unpack_from(self.data, at)[0]
            else:
                at += count * np.dtype(self.gguf_scalar_to_np[gguf.GGUFValueType(kind)]).itemsize
            return at - orig_offs, [], [], [gguf.GGUFValueType.ARRAY]

    return Reader(path)


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError:
        raise UserError("this needs the package gguf; install it with pip install -e '.[gguf]'.") from None
    return gguf


def gguf_settings(path: str) -> tuple[str, dict[str, Any]]:
    """Return the model type and the settings of a GGUF file, both as transformers names them.

    Raises UserError if the file is missing, damaged, one of several parts or without embedding weights, no family has
    its model type, a setting is missing, impossible or not supported, or the package gguf is not installed.
    """
    settings, tensors = read_head(path)
    own, type_ = settings.own, TYPES.get(settings.family, settings.family)
    family = next((family for family in FAMILIES if family.model_type == type_), None)
    if family is None:
        known = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES))
        raise UserError(f"{path!r} must be a model of type {known}, but is of {settings.family!r:.80}.")
    if "token_embd.weight" not in tensors:
        raise UserError(f"{path!r} must hold all weights of its settings, but lacks 'token_embd.weight'.")
    heads, d_model, num_layers = (own(KEYS[name]) for name in ("num_heads", "d_model", "num_layers"))
    if odd := [size for size in (heads, d_model, num_layers) if not isinstance(size, int)]:
        raise UserError(f"heads, width and layers of {path!r} must be whole numbers, but one is {odd[0]!r:.40}.")
    if not heads or (own(KEYS["head_size"], 0) == 0 and d_model % heads):
        raise UserError(f"`attention.head_count` of {path!r} must divide the width, {d_model}, but is {heads}.")
    head_size = own(KEYS["head_size"], d_model // heads)
    usual = {"attention.value_length": head_size, "expert_count": 0}
    usual |= {} if "head_dim" in family.sizes else {KEYS["head_size"]: d_model // heads}
    usual |= {} if family.partly else {"rope.dimension_count": head_size}
    for name, value in usual.items():
        if (given := own(name, value)) != value:
            raise UserError(f"`{name}` of {path!r} must be {value!r}, but is {given!r}; it cannot be imported.")
    config: dict[str, Any] = {name: own("attention.layer_norm_epsilon") for name in family.fixed if "eps" in name}
    config |= {"vocab_size": int(tensors["token_embd.weight"].shape[1])}
    config |= {"rope_parameters": _rope(settings, head_size)} if family.turns else {}
    scalar = d_model // heads if num_layers in LARGEST_GEMMAS else head_size
    defaults = {"num_kv_heads": heads, "head_size": head_size, **dict.fromkeys(BY_FAMILY, "")}
    for theirs, ours in family.sizes.items():
        name = ours.ours if isinstance(ours, Number) else ours
        if name in KEYS and (value := scalar if "scalar" in theirs else own(KEYS[name], defaults.get(name))) != "":
            config[theirs] = value
    if (window := own("attention.sliding_window", 0)) != 0:  # a wider one hides no position
        config["sliding_window"] = window if window < own(KEYS["context"]) else None
        type_ = WINDOWED.get(type_, type_) if config["sliding_window"] else type_
    if "use_parallel_residual" in family.fixed:
        config["use_parallel_residual"] = own("use_parallel_residual", True)
    if "use_qkv_bias" in family.fixed:
        config["use_qkv_bias"] = "blk.0.attn_q.bias" in tensors
    for name, linears in family.biases.items():
        config[name] = f"blk.0.{'attn_output' if 'attention.out' in linears else 'ffn_down'}.bias" in tensors
    config["tie_word_embeddings"] = "output.weight" not in tensors
    return type_, config


def _rope(settings: Settings, head_size: int) -> dict[str, Any]:
    """Return the `rope_parameters` of transformers. A factor without a type is linear, as in llama.cpp."""
    own = settings.own
    factor = own("rope.scaling.factor", own("rope.scale_linear", 0)) or 1.0
    kind = own("rope.scaling.type", "linear")
    rope = {
        "rope_theta": own("rope.freq_base", ROTARY_BASE),
        "rope_type": "default" if kind == "none" or (kind == "linear" and factor == 1) else kind,
        "factor": float(factor),
        "partial_rotary_factor": own("rope.dimension_count", head_size) / head_size,  # 1 where it is not `partly`
    }
    if settings.family != "gemma3":
        return rope
    local = {"rope_theta": own("rope.freq_base_swa", ROTARY_BASE), "rope_type": "default"}
    return {"full_attention": rope, "sliding_attention": local}


CONFIG_FILE = "config.json"
LARGEST_FILE = 2**24  # bytes of a CONFIG_FILE; hundreds of times the size of any in use
OUR_TYPE = "private-inference-decoder"  # `model_type` of what `nas.export --format hf` writes


class Checkpoint(NamedTuple):
    """The model of a checkpoint: an `Architecture`, or a torch module on the device `meta`, without weights.

    unlike: for a torch module, why no block computes the model; None for an `Architecture`.
    is_variant: whether the model is a torch module although `FAMILIES` has its model type.
    """

    model: Any
    unlike: str | None = None
    is_variant: bool = False

    @property
    def told(self) -> str:
        """How the op graph is made: `block llama`, or `traced from` the module's class, and why if `is_variant`."""
        if isinstance(self.model, Architecture):
            return f"block {self.model.block}"
        why = f", since {self.unlike}".rstrip(".") if self.is_variant else ""
        return f"traced from {type(self.model).__name__}{why}"


def is_checkpoint(name: str) -> bool:
    """Whether a text is taken as a checkpoint.

    It is if it names an existing folder or, whether it exists or not, a config.json or .gguf file; and also if it has a
    slash, such as OWNER/NAME, but no colon, and does not end in .yaml.
    """
    is_file = is_gguf(name) or Path(name).name == CONFIG_FILE
    return is_file or os.path.isdir(name) or ("/" in name and ":" not in name and not name.endswith(".yaml"))


def read_checkpoint(name: str) -> Checkpoint:
    """Return a checkpoint: with its `Architecture` if a block computes the model, else with a torch module to trace.

    Raises UserError if there is no such checkpoint, it cannot be read, its settings are impossible or unknown here, or
    the package that reads it is not installed.
    """
    if (ours := _exported(name)) is not None:
        return Checkpoint(ours)
    config = read_config(name)
    try:
        return Checkpoint(architecture_of(config, name))
    except NoBlockError as error:
        import torch

        make = transformers_library().AutoModelForCausalLM.from_config
        with torch.device("meta"):  # shapes but no values
            module = read_foreign(what_is_asked(name), lambda: make(config, trust_remote_code=False))
        return Checkpoint(module, str(error), config.model_type in {family.model_type for family in FAMILIES})


def read_config(name: str) -> Any:
    """Return a checkpoint's settings as a config of transformers.

    Raises UserError if they are missing, cannot be read or are impossible, or the package that reads them is not
    installed.
    """
    transformers, what = transformers_library(), what_is_asked(name)
    if is_gguf(name):
        type_, settings = gguf_settings(name)
        require_sound(settings, name)
        return read_foreign(f"{name!r} must be a model", lambda: transformers.AutoConfig.for_model(type_, **settings))
    folder = str(Path(name).parent) if Path(name).name == CONFIG_FILE else name
    if not os.path.exists(folder) and looks_like_a_path(folder):  # the hub would be asked for half a minute
        raise UserError(f"{what}, but there is no such folder.")
    if os.path.exists(folder) and not os.path.isfile(Path(folder, CONFIG_FILE)):
        raise UserError(f"{what}, but the folder has no {CONFIG_FILE}.")
    require_small(Path(folder, CONFIG_FILE))
    settings, _ = read_foreign(what, lambda: transformers.PretrainedConfig.get_config_dict(folder))
    require_sound(settings, name)
    return read_foreign(what, lambda: transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))


def require_small(path: Path) -> None:
    """Raise UserError if the file at `path` has more than `LARGEST_FILE` bytes; a missing file raises nothing."""
    if path.is_file() and (size := path.stat().st_size) > LARGEST_FILE:
        raise UserError(f"{path} must be settings of at most {LARGEST_FILE:,} bytes, but has {size:,}.")


def read_foreign(what: str, load: Callable[[], Any]) -> Any:
    """Return the result of `load()`; any exception in it becomes a UserError whose message begins with `what`."""
    try:
        return load()
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UserError(f"{what} without code of its own, which is never run here; convert it first.") from None
        if "weights_only" in str(error):
            raise UserError(
                f"{what} with weights alone, but a file holds other objects; save it as safetensors."
            ) from None
        raise UserError(f"{what} that can be read, but: {' '.join(str(error).split()):.300}") from None


def looks_like_a_path(name: str) -> bool:
    """Whether a checkpoint's name is taken as a path, since it is no id on the hub.

    Ids are NAME, or OWNER/NAME if OWNER is neither an existing folder nor `~`.
    """
    first, *others = name.split("/")
    return len(others) > 1 or first in ("", ".", "..", "~") or (len(others) == 1 and os.path.isdir(first))


def what_is_asked(name: str) -> str:
    return f"{name!r} must be a folder of save_pretrained or a model id on the Hugging Face hub"


def _exported(name: str) -> Architecture | None:
    """Return the architecture of an export of this package, without running its code; None for other checkpoints."""
    path = Path(name) if Path(name).name == CONFIG_FILE else Path(name, CONFIG_FILE)
    require_small(path)
    try:
        settings = read_json(path)
    except (OSError, ValueError):
        return None
    if not isinstance(settings, dict) or settings.get("model_type") != OUR_TYPE:
        return None
    return decode(Architecture, settings.get("architecture"), f"`architecture` of {path}")


def transformers_library() -> Any:
    """Return the module transformers, set to log errors only. Raises UserError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise UserError("this needs transformers; install it with pip install -e '.[hf]'.") from None
    library: Any = transformers
    library.logging.set_verbosity_error()  # what matters is raised
    library.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return library
