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

MOST_LIKELY = 16  # tokens of each prediction; the rest of the vocabulary counts as one more
RECORD = np.dtype([("token", "<u4"), ("log_probability", "<f4")])  # token plus one, so that 0 is a record never written

Records: TypeAlias = NDArray[np.void]  # T x tokens


class Predictions(NamedTuple):
    """The most likely next tokens after each token: ids, int64, and log-probabilities, both batch x T x tokens."""

    tokens: Tensor
    log_probabilities: Tensor


class Teacher:
    """A parent that predicts. Its numbers do not depend on what is kept, nor on the batch that a sequence is in.

    path: file of the predictions so far, at the place of each sequence; None to keep none.
    """

    def __init__(self, model: Decoder, path: Path | None = None) -> None:
        self.model, self.path = model, path
        self.most_likely = min(MOST_LIKELY, model.architecture.vocab_size - 1)

    def predictions(self, indices: Sequence[int], inputs: Tensor) -> Predictions:
        """inputs: batch x T, the sequences with these numbers in the corpus."""
        shape = (inputs.shape[1], self.most_likely)
        rows = []
        for index, sequence in zip(indices, inputs, strict=True):
            row = self._read(index, shape)
            if row is None:
                row = self._computed(sequence)
                self._write(index, row)
            rows.append(row)
        records = np.stack(rows)
        return Predictions(
            torch.from_numpy(records["token"].astype(np.int64) - 1).to(inputs.device),
            torch.from_numpy(records["log_probability"].copy()).to(inputs.device),
        )

    @torch.no_grad()
    def _computed(self, sequence: Tensor) -> Records:
        logits = self.model(sequence[None], with_entropies=False).logits[0].float()  # T x vocab
        values, tokens = functional.log_softmax(logits, dim=1).topk(self.most_likely, dim=1)
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
