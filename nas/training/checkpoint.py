"""Checkpoints of a trial: complete or absent, verified when read, never pickled.

`checkpoints/step-000000128/` has `weights.safetensors` (the model), `optimizer.safetensors` (the state of the optimizer
and other trained values) and `state.json` (identity, progress, SHA-256 of the other two). The folder is written under
another name and then renamed. The previous checkpoint is kept as a fallback; older ones are removed. After the end of a
training only `step-000000128-end/` is kept, without `optimizer.safetensors`.
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

from costmodel.config.files import MOST_WEIGHTS, read_bytes, read_json
from costmodel.errors import UserError
from nas.recipe.candidate import Candidate, candidate_id
from nas.storage import write_through
from nas.training.outcome import Outcome, RungRecord

FOLDER = "checkpoints"
NUM_KEPT = 2
WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The state of a trial between two steps.

    identity: candidate, corpus and seed, which must be equal on resuming. progress: a `TrainingProgress` as JSON data.
        weights: result of `stored_weights`. optimizer: states of the optimizers and other trained values; None if the
        training has ended. device: kind of the device that wrote the checkpoint (`kind_of`); None if not recorded.
    """

    step: int
    identity: Mapping[str, Any]
    progress: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor] | None
    device: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProgress:
    """Progress of a run, as plain data that checkpoints store beside tensors.

    step, seconds: steps taken, and the wall time of the trial in all its processes. initial_loss: training loss of the
        first step or, if larger (as when training starts from a trained model), the corpus's unigram loss, nats per
        token; None before the first finite loss. losses: training losses of the last `divergence.WINDOW` steps.
    rungs: records so far. outcome: None until the end.
    """

    step: int = 0
    seconds: float = 0.0
    initial_loss: float | None = None
    losses: tuple[float, ...] = ()
    rungs: tuple[RungRecord, ...] = ()
    outcome: Outcome | None = None


def save(trial: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint into a trial's folder, and remove old ones. Raises OSError, e.g. if the disk is full."""
    folder = trial / FOLDER
    ended = checkpoint.optimizer is None
    final = folder / f"step-{checkpoint.step:09d}{'-end' if ended else ''}"
    draft = folder / f"{final.name}.draft"
    for stale in folder.glob("*.draft"):  # left by a killed process
        shutil.rmtree(stale, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        # Through bytes, since on a full disk safetensors' own writer raises an error that is no OSError.
        # One file at a time, since each is in memory twice.
        files = {WEIGHTS_FILE: checkpoint.weights, OPTIMIZER_FILE: checkpoint.optimizer}
        digests = {}
        for name, tensors in files.items():
            if tensors is not None:
                raw = safetensors.torch.save(dict(tensors))
                write_through(draft / name, raw)
                digests[name] = hashlib.sha256(raw).hexdigest()
                del raw
        state = {"step": checkpoint.step, "identity": dict(checkpoint.identity), "progress": dict(checkpoint.progress)}
        state |= {"device": checkpoint.device, "sha256": digests}
        write_through(draft / STATE_FILE, json.dumps(state, allow_nan=False).encode())
        shutil.rmtree(final, ignore_errors=True)
        draft.rename(final)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    older = [path for path in _by_age(trial) if path.name < final.name]
    for other in _by_age(trial):  # newer ones are damaged, since a run is resumed from its newest whole checkpoint
        if other != final and (ended or other not in older[: NUM_KEPT - 1]):
            shutil.rmtree(other, ignore_errors=True)


def load_latest(trial: Path, identity: Mapping[str, Any] | None = None) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, or None without one; damaged ones are skipped with a warning.

    identity: None for any. Raises UserError if the checkpoint's candidate, corpus or seed differs from `identity`.
    """
    for folder in _by_age(trial):
        try:
            checkpoint = _read(folder)
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            warnings.warn(f"checkpoint {folder} is damaged and passed over: {error}", stacklevel=2)
            continue
        for key, value in (identity or {}).items():
            if (other := checkpoint.identity.get(key)) != value:
                raise UserError(f"checkpoint {folder} must be of {key} {value}, but is of {other}; use another folder.")
        return checkpoint
    if _by_age(trial):
        warnings.warn(f"{trial} has no whole checkpoint left", stacklevel=2)
    return None


def load_latest_of(trial: Path, candidate: Candidate) -> Checkpoint:
    """Return the newest undamaged checkpoint; raise UserError if there is none, or it is of another candidate."""
    latest = load_latest(trial, {"candidate": candidate_id(candidate)})
    if latest is None:
        raise UserError(f"{trial} must have a whole checkpoint, but has none; train on with --resume.")
    return latest


def _read(folder: Path) -> Checkpoint:
    state = read_json(folder / STATE_FILE)
    tensors = {}
    for name in {WEIGHTS_FILE, OPTIMIZER_FILE} & state["sha256"].keys():  # never a path out of the folder
        raw = read_bytes(folder / name, MOST_WEIGHTS)
        if hashlib.sha256(raw).hexdigest() != state["sha256"][name]:
            raise UserError(f"{name} does not have the recorded SHA-256")
        tensors[name] = safetensors.torch.load(raw)
    given = {name: state[name] for name in ("step", "identity", "progress")} | {"device": state.get("device")}
    return Checkpoint(**given, weights=tensors[WEIGHTS_FILE], optimizer=tensors.get(OPTIMIZER_FILE))


def _by_age(trial: Path) -> list[Path]:
    """Return the checkpoint folders, newest first."""
    return sorted((path for path in (trial / FOLDER).glob("step-*") if path.suffix != ".draft"), reverse=True)
