"""Pretrained models, and exports: the folders in which `nas.export` writes them.

CHECKSUMS_FILE holds the SHA-256 of every other file of an export, so that a lost or edited file is noticed.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from costmodel.config.files import MOST_WEIGHTS, read_bytes, read_json
from costmodel.config.units import format_bytes
from costmodel.errors import UserError
from nas.corpus.documents import GivenTokenizer
from nas.corpus.held_out import KEPT_TYPE, KeptWindows
from nas.corpus.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, kept_tokenizer, write_tokenizer
from nas.malloc import free_bytes
from nas.model.weights import WEIGHTS_FILE
from search_spaces.architecture import Architecture, dump_architecture, load_architecture
from search_spaces.lower import lower

TRAINED_FILE = "trained.yaml"
CHECKSUMS_FILE = "checksums.json"
EXPORT_FILE = "export.yaml"
WINDOWS_FILE = "trained-on.u32"
COPIES = 2  # of every weight in single precision while a model is loaded: as it is read, and under our name


class Pretrained(NamedTuple):
    """A pretrained model.

    weights: by `<node>.<suffix>`, in single precision, in the form that the op graph runs (`deployed_weights`). No two
        share memory: a tied output table is copied.
    tokenizer: None if the model came without one. windows: rising hashes of windows of five lines of its training text
        (`nas.corpus.held_out`); None if unknown.
    notes: remarks for the user on how the model was read.
    """

    architecture: Architecture
    weights: dict[str, Tensor]
    tokenizer: GivenTokenizer | None
    windows: KeptWindows | None = None
    notes: tuple[str, ...] = ()


def is_sound(value: Tensor) -> bool:
    """Whether a weight is finite and of a floating-point type of 16 or more bits; 8-bit weights would need scales."""
    return value.is_floating_point() and value.element_size() > 1 and bool(value.isfinite().all())


def is_export(folder: Path) -> bool:
    """Whether a folder has TRAINED_FILE, else whether its CHECKSUMS_FILE lists it; then raises UserError if damaged."""
    return (folder / TRAINED_FILE).is_file() or TRAINED_FILE in _checksums(folder)


def read_export(folder: Path) -> Pretrained:
    """Read the model that `nas.export` wrote into a folder, with its tokenizer if there is a tokenizer.json.

    Raises UserError, naming the file, if a file is missing or damaged or does not match the folder's checksums, or if a
    weight is missing, has another shape than its op states, or is not sound (`is_sound`).
    """
    require_checksums(folder)
    architecture, path = load_architecture(folder / TRAINED_FILE), folder / WEIGHTS_FILE
    content = read_bytes(path, MOST_WEIGHTS)
    try:
        weights = load(content)
    except (KeyError, TypeError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} must be the weights of {TRAINED_FILE} beside it, but: {error}.") from None
    for node in lower(architecture, architecture.context):
        for suffix, shape in node.op.weight_shapes.items():
            name = f"{node.name}.{suffix}"
            if name not in weights or weights[name].shape != shape:
                held = tuple(weights[name].shape) if name in weights else "none"
                raise UserError(f"{path} must hold {name!r} of shape {shape}, as {TRAINED_FILE} says, but has {held}.")
            if not is_sound(weights[name]):
                raise UserError(f"{path} must hold finite floating-point numbers, but {name!r} does not.")
    tokenizer = read_tokenizer(folder)
    single = {name: value.float() for name, value in weights.items()}
    return Pretrained(architecture, single, tokenizer, read_windows(folder))


def read_windows(folder: Path) -> KeptWindows | None:
    """Return a folder's `Pretrained.windows`; None without WINDOWS_FILE. Raises UserError if it is damaged."""
    path = folder / WINDOWS_FILE
    if not path.is_file():
        return None
    content = read_bytes(path, MOST_WEIGHTS)
    windows = np.frombuffer(content[: len(content) // KEPT_TYPE.itemsize * KEPT_TYPE.itemsize], KEPT_TYPE)
    if windows.nbytes < len(content) or (windows[1:] <= windows[:-1]).any():
        raise UserError(f"{path} must be rising numbers of 32 bits, as nas.export writes them; restore or remove it.")
    return windows


def read_architecture(folder: Path) -> tuple[Architecture, GivenTokenizer | None]:
    """Return the architecture of an export, whose weights may be missing, and its tokenizer, or None if it has none.

    Raises UserError, naming the file, if TRAINED_FILE is missing or damaged, if the tokenizer or CHECKSUMS_FILE is
    damaged, or if, by CHECKSUMS_FILE, TRAINED_FILE, tokenizer.json or tokenizer_config.json is lost or edited.
    """
    require_checksums(folder, (TRAINED_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE))
    return load_architecture(folder / TRAINED_FILE), read_tokenizer(folder)


def read_tokenizer(folder: Path) -> GivenTokenizer | None:
    """Return the tokenizer in a folder of weights; None without a tokenizer.json. Raises UserError if it is damaged.

    The tokenizer is named after its algorithm, such as `bpe`, so that a copy in another folder has the same name.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return None
    kept = kept_tokenizer(folder, "")
    try:
        return replace(kept, name=str(json.loads(kept.json)["model"]["type"]).lower())
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{path} must be a whole tokenizer.json; put that of the weights there.") from None


def write_pretrained(model: Pretrained, folder: Path) -> None:
    """Write a model with checksums for `read_export`. Raises OSError, or UserError if `folder` has a subfolder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRAINED_FILE).write_text(dump_architecture(model.architecture), encoding="utf-8")
    (folder / WEIGHTS_FILE).write_bytes(save(model.weights))
    if model.tokenizer is not None:
        write_tokenizer(folder, model.tokenizer.json, model.tokenizer.end_of_text, model.tokenizer.files)
    if model.windows is not None:
        (folder / WINDOWS_FILE).write_bytes(model.windows.tobytes())
    write_checksums(folder)


def write_checksums(folder: Path) -> None:
    """Write the SHA-256 of a folder's other files to CHECKSUMS_FILE. Raises OSError, or UserError for a subfolder."""
    sums = {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.name != CHECKSUMS_FILE}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(sums, indent=1) + "\n", encoding="utf-8")


def require_checksums(folder: Path, names: Sequence[str] | None = None) -> None:
    """Raise UserError, naming the file, if a file is missing or altered, or CHECKSUMS_FILE itself is damaged.

    Only files that CHECKSUMS_FILE lists are checked: all, or those in `names`. A folder without CHECKSUMS_FILE passes.
    """
    for name, expected in _checksums(folder).items():
        if names is not None and name not in names:
            continue
        actual = _sha256(folder / name) if (folder / name).is_file() else "gone"
        if actual != expected:
            raise UserError(
                f"{folder / name} must be as it was written (SHA-256 {expected[:12]}), but is {actual[:12]}; "
                "restore it."
            )


def _checksums(folder: Path) -> dict[str, str]:
    """Return checksums by file name; empty for a folder without CHECKSUMS_FILE. Raises UserError if it is damaged."""
    path = folder / CHECKSUMS_FILE
    if not path.is_file():
        return {}
    sums = read_json(path, rule := "must hold the SHA-256 of the files beside it")
    if not isinstance(sums, dict) or any(Path(name).name != name or type(sums[name]) is not str for name in sums):
        raise UserError(f"{path} {rule} by their names; restore it.")
    return sums


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_bytes(path, MOST_WEIGHTS)).hexdigest()


def require_memory(architecture: Architecture, path: str) -> None:
    """Raise UserError if COPIES copies of a model's weights in single precision exceed the free memory, if known."""
    shapes = [shape for node in lower(architecture, 1) for shape in node.op.weight_shapes.values()]
    num_weights, free = sum(map(math.prod, shapes)), free_bytes()  # a tied table is stored, and counted, twice
    needed = COPIES * 4 * num_weights
    if free is not None and needed > free:
        raise UserError(
            f"{path!r} has {num_weights:,} weights, which take {format_bytes(needed)} to load ({COPIES} "
            f"copies in single precision), but {format_bytes(free)} of memory are free; use a machine with more."
        )
