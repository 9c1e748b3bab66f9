"""Reads the settings of a checkpoint: a folder of `save_pretrained`, its config.json, an id on the hub or a GGUF file.

Only settings are read. Needs the extra `hf`, and `gguf` for a GGUF file, which are imported when a function is called.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from costmodel.config.files import decode, read_json
from costmodel.errors import UserError
from search_spaces.architecture import Architecture
from search_spaces.checkpoints.families import FAMILIES
from search_spaces.checkpoints.gguf_head import gguf_settings, is_gguf
from search_spaces.checkpoints.known_settings import require_sound
from search_spaces.checkpoints.settings import NoBlockError, architecture_of

EXTRA = "this needs transformers; install it with pip install -e '.[hf]'."
CONFIG_FILE = "config.json"
LARGEST_FILE = 2**24  # bytes of a CONFIG_FILE; hundreds of times the longest
OUR_TYPE = "private-inference-decoder"  # `model_type` of what `nas.export --format hf` writes


class Checkpoint(NamedTuple):
    """The model of a checkpoint: an `Architecture`, or a torch module on the device `meta`, without weights.

    unlike: why a module has no `Architecture`. is_variant: whether other models of its type have one.
    """

    name: str
    model: Any
    unlike: str | None = None
    is_variant: bool = False

    @property
    def told(self) -> str:
        """A sentence that says whether its op graph is lowered or traced."""
        if isinstance(self.model, Architecture):
            return f"block {self.model.block}"
        why = f", since {self.unlike}".rstrip(".") if self.is_variant else ""
        return f"traced from {type(self.model).__name__}{why}"


def is_checkpoint(name: str) -> bool:
    """Whether this is the name of a checkpoint: a folder, a config.json, a GGUF file, or OWNER/NAME on the hub."""
    is_file = is_gguf(name) or Path(name).name == CONFIG_FILE
    return is_file or os.path.isdir(name) or ("/" in name and ":" not in name and not name.endswith(".yaml"))


def read_checkpoint(name: str) -> Checkpoint:
    """Return the architecture of a checkpoint if a block computes it, else its torch module, to be traced.

    Raises UserError if there is none, it cannot be read, its settings are of no model or have no meaning here, or its
    package is not installed.
    """
    if (ours := _exported(name)) is not None:
        return Checkpoint(name, ours)
    config = read_config(name)
    try:
        return Checkpoint(name, architecture_of(config, name))
    except NoBlockError as error:
        import torch

        make = transformers_library().AutoModelForCausalLM.from_config
        with torch.device("meta"):  # shapes but no values
            module = read_foreign(what_is_asked(name), lambda: make(config, trust_remote_code=False))
        return Checkpoint(name, module, str(error), config.model_type in {family.model_type for family in FAMILIES})


def read_config(name: str) -> Any:
    """Return the settings of a checkpoint as a config of transformers. Raises UserError as `read_checkpoint` does."""
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
    """Raise UserError for a file of settings of more than `LARGEST_FILE` bytes, if it exists."""
    if path.is_file() and (size := path.stat().st_size) > LARGEST_FILE:
        raise UserError(f"{path} must be settings of at most {LARGEST_FILE:,} bytes, but has {size:,}.")


def read_foreign(what: str, load: Callable[[], Any]) -> Any:
    """Return the result of `load`; any exception that a foreign file causes becomes a UserError."""
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
    """Whether a name can only be a path, since an id on the hub is NAME or OWNER/NAME."""
    first, *others = name.split("/")
    return len(others) > 1 or first in ("", ".", "..", "~") or (len(others) == 1 and os.path.isdir(first))


def what_is_asked(name: str) -> str:
    return f"{name!r} must be a folder of save_pretrained or a model id on the Hugging Face hub"


def _exported(name: str) -> Architecture | None:
    """Return the architecture of an export of this package; its code is not run."""
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
    """Import transformers without its log output. Raises UserError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise UserError(EXTRA) from None
    library: Any = transformers
    library.logging.set_verbosity_error()  # what matters is raised
    library.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    return library
