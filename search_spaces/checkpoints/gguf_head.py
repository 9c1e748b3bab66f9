"""The head of a `.gguf` file: settings and tensors of a model of Llama's family, and its architecture.

Needs the package `gguf` (extra `gguf`). Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md for names of
settings.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from costmodel.errors import UserError
from costmodel.ops import ROTARY_BASE
from search_spaces.architecture import Architecture
from search_spaces.bases import LLAMA_LAYER
from search_spaces.block import BlockName
from search_spaces.checkpoints.settings import imported

EXTRA = "this needs the package gguf; install it with pip install -e '.[gguf]'."


class Family(NamedTuple):
    """pairs_neighbours: whether features f, f + 1 of queries and keys turn together, not halves."""

    block: BlockName
    pairs_neighbours: bool


# by `general.architecture`, which calls these as we call their blocks
FAMILIES: dict[str, Family] = {
    family.block: family for family in (Family("llama", pairs_neighbours=True), Family("qwen2", pairs_neighbours=False))
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


def read_head(path: str) -> tuple[Settings, dict[str, Any]]:
    """Settings and tensors by name."""
    if not Path(path).is_file():
        raise UserError(f"{path!r} must be a GGUF file, but there is none.")
    return _read_at(path, Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=1)  # a large vocabulary takes seconds
def _read_at(path: str, modified_ns: int) -> tuple[Settings, dict[str, Any]]:
    try:
        reader = gguf_package().GGUFReader(path)
        settings = Settings(path, {name: field.contents() for name, field in reader.fields.items()})
        return settings, {tensor.name: tensor for tensor in reader.tensors}
    except UserError:
        raise
    except Exception as error:  # whatever a foreign file provokes is the user's bad input
        reason = f"{error!s:.200}".rstrip(".")
        raise UserError(f"{path!r} must be a whole GGUF file, but: {reason}; get it again, or convert it.") from None


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError:
        raise UserError(EXTRA) from None
    return gguf


def head_architecture(settings: Settings, tensors: Mapping[str, Any]) -> Architecture:
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
