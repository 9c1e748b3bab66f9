"""What a parent says of the sequences that its candidates train on. Computed once for all of them, kept on disk."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from nas.conversion.parent import Parent
from nas.corpus.corpus import Corpus
from nas.model.decoder import Decoder
from nas.recipe.recipe import Recipe

LOGITS_AT_A_TIME = {"cpu": 1 << 22, "cuda": 1 << 28}  # at least one sequence's: 16 MiB of fp32, 1 GiB
RECORD = np.dtype([("token", "<u4"), ("log_probability", "<f4")])
MOST_CACHED_SHARE = 1 / 4  # of the free disk, for one cache of the outputs of a parent
STREAM = np.dtype("<f2")  # of a feature that a norm leaves; its rounding is far below what candidates are off by
WRITTEN = b"\x01"  # behind a record that is whole

Records: TypeAlias = NDArray[Any]  # of some sequences, or of one


class Predictions(NamedTuple):
    """The most likely next tokens after each token: ids, int64, and log-probabilities, both batch x T x tokens."""

    tokens: Tensor
    log_probabilities: Tensor


class Kept:
    """Records of sequences in a file, each at the place of its number. dtype, shape: of one."""

    def __init__(self, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.path, self.dtype, self.shape = path, dtype, shape
        self.num_bytes = dtype.itemsize * int(np.prod(shape))

    def read(self, index: int) -> Records | None:
        """None if the record is not there as a whole."""
        size = self.num_bytes + len(WRITTEN)
        try:
            with self.path.open("rb", buffering=0) as file:
                raw = os.pread(file.fileno(), size, index * size)
        except OSError:
            return None
        is_whole = len(raw) == size and raw.endswith(WRITTEN)
        return np.frombuffer(raw[: self.num_bytes], dtype=self.dtype).reshape(self.shape) if is_whole else None

    def write(self, index: int, record: Records) -> None:
        """Keeps the record, unless the disk does not take it."""
        at = index * (self.num_bytes + len(WRITTEN))
        with suppress(OSError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                os.pwrite(descriptor, record.tobytes(), at)
                os.pwrite(descriptor, WRITTEN, at + self.num_bytes)
            finally:
                os.close(descriptor)


class Teacher:
    """A parent that predicts. On a CPU its numbers do not depend on what is kept, nor on the batch of a sequence.

    most_likely: tokens of each prediction; the rest of the vocabulary counts as one more.
    predictions_path, hidden_states_path: files of what was computed so far; None to keep none.
    """

    def __init__(
        self,
        model: Decoder,
        most_likely: int,
        predictions_path: Path | None = None,
        hidden_states_path: Path | None = None,
    ) -> None:
        self.model, self.predictions_path, self.hidden_states_path = model, predictions_path, hidden_states_path
        self.most_likely = min(most_likely, model.architecture.vocab_size - 1)
        self.readers = [*(layer.get_submodule("norm1") for layer in model.layers[1:]), model.final_norm]

    def predictions(self, indices: Sequence[int], inputs: Tensor) -> Predictions:
        """inputs: batch x T, the sequences with these numbers in the corpus."""
        kept = _kept(self.predictions_path, RECORD, (inputs.shape[1], self.most_likely))
        records = _all(kept, indices, inputs, self._predicted)
        return Predictions(
            torch.from_numpy(records["token"].astype(np.int64)).to(inputs.device),
            torch.from_numpy(records["log_probability"].copy()).to(inputs.device),
        )

    def hidden_states(self, indices: Sequence[int], inputs: Tensor) -> Tensor:
        """What each layer's stream is to the norm that reads it next, batch x layers x T x d_model, in half precision.

        inputs: as `predictions` takes them.
        """
        shape = (len(self.readers), inputs.shape[1], self.model.architecture.d_model)
        records = _all(_kept(self.hidden_states_path, STREAM, shape), indices, inputs, self._normed)
        return torch.from_numpy(records).to(inputs.device)

    def hidden_state_error(self, wanted: Tensor, hidden_states: Sequence[Tensor]) -> Tensor:
        """How far a model's hidden states are from the parent's as its next norm reads them.

        So the few features that are far larger than others do not dominate. Squared errors over the mean square, the
        mean over layers and positions.

        wanted: as `hidden_states` gives it. hidden_states: as `Decoder.features` gives them for the same sequences,
            each batch x T x d_model.
        """
        errors = []
        for norm, stream, parents in zip(self.readers, hidden_states[1:], wanted.float().unbind(1), strict=True):
            squares = (norm(stream.float()) - parents).square().mean(dim=(0, 2))
            errors.append(squares / parents.square().mean(dim=(0, 2)))
        return torch.stack(errors).mean()

    @torch.no_grad()
    def _predicted(self, inputs: Tensor) -> Records:
        """inputs: sequences x T; the records: sequences x T x tokens."""
        vocab_size = self.model.architecture.vocab_size
        num = max(1, LOGITS_AT_A_TIME[inputs.device.type] // (inputs.shape[1] * vocab_size))
        parts = []
        for some in torch.split(inputs, num):
            logits = self.model(some, with_entropies=False).logits.float()  # sequences x T x vocab
            parts.append(functional.log_softmax(logits, dim=-1).topk(self.most_likely, dim=-1))
        values, tokens = (torch.cat(list(part)) for part in zip(*parts, strict=True))
        records = np.empty(tokens.shape, dtype=RECORD)
        records["token"], records["log_probability"] = tokens.cpu().numpy(), values.cpu().numpy()
        return records

    @torch.no_grad()
    def _normed(self, inputs: Tensor) -> Records:
        """inputs: sequences x T; the records: sequences x layers x T x d_model."""
        passed = self.model.hidden_states(inputs)[1:]
        wanted = torch.stack([norm(stream) for norm, stream in zip(self.readers, passed, strict=True)], dim=1)
        return wanted.half().cpu().numpy()


def _kept(path: Path | None, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Kept | None:
    return None if path is None else Kept(path, dtype, shape)


def _all(kept: Kept | None, indices: Sequence[int], inputs: Tensor, computed: Callable[[Tensor], Records]) -> Records:
    """The records of these sequences, in order, and from now on kept. computed: of those that are not there."""
    records = {index: kept.read(index) if kept else None for index in indices}
    missing = [place for place, index in enumerate(indices) if records[index] is None]
    if missing:
        for place, record in zip(missing, computed(inputs[missing]), strict=True):
            records[indices[place]] = record
            if kept:
                kept.write(indices[place], record)
    return np.stack([record for index in indices if (record := records[index]) is not None])


def teacher_of(parent: Parent, corpus: Corpus, recipe: Recipe, device: str) -> Teacher:
    """Return the parent as a teacher; its outputs are cached beside the corpus if the disk has room for them."""
    assert recipe.distillation is not None
    distillation, architecture, num_tokens = recipe.distillation, parent.model.architecture, recipe.scale.seen_tokens
    ending = f"{parent.digest}-{recipe.scale.seq_len}-{device.partition(':')[0]}.bin"
    features = architecture.num_layers * architecture.d_model if distillation.hidden_state_weight else 0
    return Teacher(
        parent.decoder().to(device),
        distillation.teacher_top_k,
        _cache_path(
            corpus,
            f"likely-{distillation.teacher_top_k}-{ending}",
            num_tokens * distillation.teacher_top_k * RECORD.itemsize,
        ),
        _cache_path(corpus, f"hidden-states-{ending}", num_tokens * features * STREAM.itemsize),
    )


def _cache_path(corpus: Corpus, name: str, num_bytes: int) -> Path | None:
    """Return the path of a cache file, or None if the cache would take too much of the free disk."""
    path = Path(corpus.folder) / name
    return path if path.exists() or num_bytes <= MOST_CACHED_SHARE * disk_usage(corpus.folder).free else None
