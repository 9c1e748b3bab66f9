"""A parent's predictions on the sequences that its candidates train on. Computed once for all of them, kept on disk."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from nas.model.decoder import Decoder

LOGITS_AT_A_TIME = {"cpu": 1 << 22, "cuda": 1 << 28}  # at least one sequence's: 16 MiB of fp32, 1 GiB
RECORD = np.dtype([("token", "<u4"), ("log_probability", "<f4")])  # token plus one, so that 0 is a record never written

Records: TypeAlias = NDArray[np.void]  # T x tokens, of one sequence


class Predictions(NamedTuple):
    """The most likely next tokens after each token: ids, int64, and log-probabilities, both batch x T x tokens."""

    tokens: Tensor
    log_probabilities: Tensor


class Teacher:
    """A parent that predicts. On a CPU its numbers do not depend on what is kept, nor on the batch of a sequence.

    most_likely: tokens of each prediction; the rest of the vocabulary counts as one more.
    path: file of the predictions so far, at the place of each sequence; None to keep none.
    """

    def __init__(self, model: Decoder, most_likely: int, path: Path | None = None) -> None:
        self.model, self.path = model, path
        self.most_likely = min(most_likely, model.architecture.vocab_size - 1)

    def predictions(self, indices: Sequence[int], inputs: Tensor) -> Predictions:
        """inputs: batch x T, the sequences with these numbers in the corpus."""
        shape = (inputs.shape[1], self.most_likely)
        kept = {index: self._read(index, shape) for index in indices}
        missing = [place for place, index in enumerate(indices) if kept[index] is None]
        if missing:
            for place, row in zip(missing, self._computed(inputs[missing]), strict=True):
                self._write(indices[place], row)
                kept[indices[place]] = row
        records = np.stack([row for index in indices if (row := kept[index]) is not None])
        return Predictions(
            torch.from_numpy(records["token"].astype(np.int64) - 1).to(inputs.device),
            torch.from_numpy(records["log_probability"].copy()).to(inputs.device),
        )

    def stream_error(self, inputs: Tensor, streams: Sequence[Tensor]) -> Tensor:
        """How far a model's streams are from the parent's as its next norm reads them, so that the few features do not
        rule that are far larger than others: squared errors over the mean square, the mean over layers and positions.

        inputs: batch x T. streams: as `Decoder.features` gives them for these, each batch x T x d_model.
        """
        with torch.no_grad():
            theirs = self.model.streams(inputs)
        norms, errors = [layer.get_submodule("norm1") for layer in self.model.layers], []
        for norm, stream, parents in zip((*norms[1:], self.model.final_norm), streams[1:], theirs[1:], strict=True):
            wanted = norm(parents)
            squares = (norm(stream.float()) - wanted).square().mean(dim=(0, 2))
            errors.append(squares / wanted.square().mean(dim=(0, 2)))
        return torch.stack(errors).mean()

    @torch.no_grad()
    def _computed(self, inputs: Tensor) -> Records:
        """inputs: sequences x T; the records: sequences x T x tokens."""
        vocab_size = self.model.architecture.vocab_size
        num = max(1, LOGITS_AT_A_TIME[inputs.device.type] // (inputs.shape[1] * vocab_size))
        parts = []
        for some in torch.split(inputs, num):
            logits = self.model(some, with_entropies=False).logits.float()  # sequences x T x vocab
            parts.append(functional.log_softmax(logits, dim=-1).topk(self.most_likely, dim=-1))
        values, tokens = (torch.cat(list(part)) for part in zip(*parts, strict=True))
        records = np.empty(tokens.shape, dtype=RECORD)
        records["token"], records["log_probability"] = tokens.cpu().numpy() + 1, values.cpu().numpy()
        return records

    def _read(self, index: int, shape: tuple[int, int]) -> Records | None:
        """The kept records of a sequence, or None if they are not all there."""
        if self.path is None:
            return None
        size = shape[0] * shape[1] * RECORD.itemsize
        try:
            with self.path.open("rb", buffering=0) as file:
                raw = os.pread(file.fileno(), size, index * size)
        except OSError:
            return None
        records = np.frombuffer(raw, dtype=RECORD) if len(raw) == size else np.zeros(1, dtype=RECORD)
        return records.reshape(shape) if records["token"].all() else None

    def _write(self, index: int, records: Records) -> None:
        """Keeps the records, unless the disk does not take them."""
        if self.path is not None:
            with suppress(OSError):
                descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
                try:
                    os.pwrite(descriptor, records.tobytes(), index * records.nbytes)
                finally:
                    os.close(descriptor)
