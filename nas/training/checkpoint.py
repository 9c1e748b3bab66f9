"""Checkpoints of a trial: complete or absent, checked when read, never pickled.

`checkpoints/step-000000128/` holds `weights.safetensors` (the model), `optimizer.safetensors` (the optimizer's state
and whatever else is trained) and `state.json` (identity, progress, SHA-256 of the other two). It is written beside
and renamed into place; the one before is kept until then, and after that as a fall-back, older ones are removed.
Of a run that has ended only `step-000000128-end/` is kept, without `optimizer.safetensors`.
"""

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from costmodel.errors import UserError
from nas.storage import write_through

FOLDER = "checkpoints"
NUM_KEPT = 2
WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A trial between two steps, as far as it needs to go on.

    identity: what must agree for that (candidate, corpus, seed). progress: plain JSON data of the training loop.
    optimizer: None if the run has ended, so that nothing can go on from here.
    """

    step: int
    identity: Mapping[str, Any]
    progress: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor] | None


def save(trial: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint into the folder of a trial. Raises OSError, e.g. when the disk is full."""
    folder = trial / FOLDER
    ended = checkpoint.optimizer is None
    final = folder / f"step-{checkpoint.step:09d}{'-end' if ended else ''}"
    draft = folder / f"{final.name}.draft"
    for stale in folder.glob("*.draft"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        # Through bytes: safetensors' own file writer turns a full disk into an error that is no OSError.
        # A file at a time, as each is in memory twice.
        files = {WEIGHTS_FILE: checkpoint.weights, OPTIMIZER_FILE: checkpoint.optimizer}
        digests = {name: _write(draft / name, tensors) for name, tensors in files.items() if tensors is not None}
        state = {
            "step": checkpoint.step,
            "identity": dict(checkpoint.identity),
            "progress": dict(checkpoint.progress),
            "sha256": digests,
        }
        write_through(draft / STATE_FILE, json.dumps(state, allow_nan=False).encode())
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        _flush_folder(folder)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    older = [path for path in _by_age(trial) if path.name < final.name]
    for other in _by_age(trial):  # a run goes on from its newest whole checkpoint, so what is newer is damaged
        if other != final and (ended or other not in older[: NUM_KEPT - 1]):
            shutil.rmtree(other, ignore_errors=True)


def load_latest(trial: Path, identity: Mapping[str, Any] | None = None) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None; a damaged one is passed over with a warning.

    Raises UserError if it belongs to another candidate, corpus or seed than `identity` says.
    """
    for folder in _by_age(trial):
        try:
            checkpoint = _read(folder)
        except (OSError, KeyError, TypeError, ValueError, RecursionError, SafetensorError) as error:
            warnings.warn(f"checkpoint {folder} is damaged and passed over: {error}", stacklevel=2)
            continue
        for key, value in (identity or {}).items():
            if (other := checkpoint.identity.get(key)) != value:
                raise UserError(f"checkpoint {folder} must be of {key} {value}, but is of {other}; use another folder.")
        return checkpoint
    if _by_age(trial):
        warnings.warn(f"{trial} has no whole checkpoint left", stacklevel=2)
    return None


def _write(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the file that is written."""
    raw = safetensors.torch.save(dict(tensors))
    write_through(path, raw)
    return hashlib.sha256(raw).hexdigest()


def _read(folder: Path) -> Checkpoint:
    state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    tensors = {}
    for name, digest in state["sha256"].items():
        raw = (folder / name).read_bytes()
        if hashlib.sha256(raw).hexdigest() != digest:
            raise UserError(f"{name} does not have the recorded SHA-256")
        tensors[name] = safetensors.torch.load(raw)
    return Checkpoint(
        step=state["step"],
        identity=state["identity"],
        progress=state["progress"],
        weights=tensors[WEIGHTS_FILE],
        optimizer=tensors.get(OPTIMIZER_FILE),
    )


def _by_age(trial: Path) -> list[Path]:
    """Newest first."""
    return sorted((path for path in (trial / FOLDER).glob("step-*") if path.suffix != ".draft"), reverse=True)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
