"""The predictions and hidden states of a parent for the sequences that its candidates train on.

On a CPU these outputs are computed once for all candidates and, if there is room, cached on disk. On a GPU the parent
runs with every candidate instead, and its predictions cover the whole vocabulary.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from nas.attention.reference import capped
from nas.conversion.parent import Parent
from nas.corpus.corpus import Corpus
from nas.model.bf16_products import bf16_products, wide_product
from nas.model.cross_entropy import Distilled, distilled, fully_distilled, padded
from nas.model.decoder import Decoder, LayerFunction
from nas.recipe.recipe import Recipe
from nas.training.device import layer_function

LOGITS_AT_A_TIME = 1 << 22  # 16 MiB of fp32, or the logits of one sequence if these are more
RECORD = np.dtype([("token", "<u4"), ("log_probability", "<f4")])  # a likely token
MOST_CACHED_SHARE = 1 / 4  # of the free disk space, that a training is expected to add at most to one cache file
BLOCK_BYTES = 512  # unit of `st_blocks`
STREAM = np.dtype("<f2")  # of a normalised hidden state; its rounding is far below the errors of candidates
WRITTEN = b"\x01"  # follows a record in the cache file once the record is complete

Records: TypeAlias = NDArray[Any]  # cached outputs, of some sequences or of one
StreamError: TypeAlias = Callable[[Sequence[Tensor]], Tensor]  # from a model's hidden states to their error


class Lesson(NamedTuple):
    """Functions that compare a model with its parent on a micro-batch; None for a comparison that is not wanted.

    distilled: maps hidden, weight, targets, share, cap and run to the losses, as `nas.model.cross_entropy.distilled`.
    hidden_state_error: maps the model's hidden states to the scalar of `Teacher.hidden_state_error`.
    """

    distilled: Callable[..., Distilled] | None
    hidden_state_error: StreamError | None


class Predictions(NamedTuple):
    """A parent's n most likely next tokens after each token: ids, int64, and log-probabilities, both batch x T x n."""

    tokens: Tensor
    log_probabilities: Tensor

    def distill(self, hidden: Tensor, weight: Tensor, targets: Tensor, **settings: Any) -> Distilled:
        """Return the losses of learning these predictions. Arguments: as of `distilled`; settings: share, cap, run."""
        likely, log_probabilities = (part.flatten(0, 1) for part in self)
        return distilled(hidden, weight, targets, likely, log_probabilities, **settings)


class Kept:
    """A cache file with one record (an array) per sequence, placed by the sequence's index.

    path: None to cache nothing. dtype, shape: of a record. least_free: bytes of the disk that stay free; a record that
    would leave fewer is not cached.
    """

    def __init__(
        self, path: Path | None, dtype: np.dtype[Any], shape: tuple[int, ...], least_free: float = 0.0
    ) -> None:
        self.path, self.dtype, self.shape, self.least_free = path, dtype, shape, least_free
        self.num_bytes = dtype.itemsize * int(np.prod(shape))

    def all(self, indices: Sequence[int], inputs: Tensor, computed: Callable[[Tensor], Records]) -> Records:
        """Return the records of the sequences `indices`, stacked in their order; compute and cache missing records.

        inputs: tokens of these sequences, sequences x T. computed: maps tokens of some of them to their records.
        """
        records = {index: self._read(self.path, index) if self.path else None for index in indices}
        missing = [place for place, index in enumerate(indices) if records[index] is None]
        if missing:
            for place, record in zip(missing, computed(inputs[missing]), strict=True):
                records[indices[place]] = record
                if self.path:
                    self._write(self.path, indices[place], record)
        return np.stack([record for index in indices if (record := records[index]) is not None])

    def _read(self, path: Path, index: int) -> Records | None:
        """Return a record; None if it is missing or incomplete."""
        size = self.num_bytes + len(WRITTEN)
        try:
            with path.open("rb", buffering=0) as file:
                raw = os.pread(file.fileno(), size, index * size)
        except OSError:
            return None
        is_whole = len(raw) == size and raw.endswith(WRITTEN)
        return np.frombuffer(raw[: self.num_bytes], dtype=self.dtype).reshape(self.shape) if is_whole else None

    def _write(self, path: Path, index: int, record: Records) -> None:
        """Write a record; if the disk is too full or that raises OSError, it is not kept."""
        at = index * (self.num_bytes + len(WRITTEN))
        with suppress(OSError):
            if disk_usage(path.parent).free - self.num_bytes < self.least_free:
                return
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                if os.pwrite(descriptor, record.tobytes(), at) == self.num_bytes:  # fewer on a nearly full disk
                    os.pwrite(descriptor, WRITTEN, at + self.num_bytes)
            finally:
                os.close(descriptor)


class Teacher(ABC):
    """A parent that candidates learn from."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.readers = [*(layer.get_submodule("norm1") for layer in model.layers[1:]), model.final_norm]

    @abstractmethod
    def lessons(
        self, indices: Sequence[int], inputs: Tensor, num_parts: int, *, predictions: bool, hidden_states: bool
    ) -> Iterator[Lesson]:
        """Yield the lesson of each of `num_parts` equal parts of a batch.

        indices: indices of the batch's sequences in the training split. inputs: tokens of these sequences, batch x T.
        predictions, hidden_states: whether to compare these.
        """

    def hidden_state_error(self, wanted: Tensor, hidden_states: Sequence[Tensor]) -> Tensor:
        """Return the relative squared error of a model's hidden states, averaged over layers and positions: a scalar.

        The output of each layer is compared after the parent's next norm (`normed`), so that the few far larger
        features do not dominate. The squared error is divided by the mean square of the parent's normalised output.

        wanted: result of `normed` for the parent. hidden_states: result of `Decoder.hidden_states` for the model and
            the same sequences, layers + 1 tensors of batch x T x d_model.
        """
        errors = []
        for norm, stream, parents in zip(self.readers, hidden_states[1:], wanted.float().unbind(1), strict=True):
            squares = (norm(stream.float()) - parents).square().mean(dim=(0, 2))
            errors.append(squares / parents.square().mean(dim=(0, 2)))
        return torch.stack(errors).mean()

    def normed(self, hidden_states: Sequence[Tensor]) -> Tensor:
        """Return each layer's output after the parent's next norm, batch x layers x T x d_model, in fp16.

        The next norm is `norm1` of the next layer, or the final norm. hidden_states: result of `Decoder.hidden_states`.
        """
        normed = [norm(stream) for norm, stream in zip(self.readers, hidden_states[1:], strict=True)]
        return torch.stack(normed, dim=1).half()


@final
class CachedTeacher(Teacher):
    """A parent on a CPU, whose outputs depend neither on what is cached nor on the other sequences of a batch.

    lowered: whether the factors of matrix products are rounded to bf16. most_likely: number of likely tokens in a
        prediction; the rest of the vocabulary counts as one more token.
    predictions_path, hidden_states_path: cache files; None for no cache. least_free: bytes of the disk that stay free.
    """

    def __init__(
        self,
        model: Decoder,
        most_likely: int,
        predictions_path: Path | None = None,
        hidden_states_path: Path | None = None,
        *,
        least_free: float = 0.0,
        lowered: bool = False,
    ) -> None:
        super().__init__(model)
        self.least_free, self.lowered = least_free, lowered
        self.predictions_path, self.hidden_states_path = predictions_path, hidden_states_path
        self.most_likely = min(most_likely, model.architecture.vocab_size - 1)
        self._last: tuple[Tensor, Tensor, list[Tensor]] | None = None

    def lessons(
        self, indices: Sequence[int], inputs: Tensor, num_parts: int, *, predictions: bool, hidden_states: bool
    ) -> Iterator[Lesson]:
        losses: Sequence[Callable[..., Distilled] | None] = [None] * num_parts
        errors: Sequence[StreamError | None] = [None] * num_parts
        if predictions:
            parts = zip(*(part.chunk(num_parts) for part in self.predictions(indices, inputs)), strict=True)
            losses = [Predictions(*part).distill for part in parts]
        if hidden_states:
            wanted = self.hidden_states(indices, inputs).chunk(num_parts)
            errors = [partial(self.hidden_state_error, part) for part in wanted]
        self._last = None  # frees the hidden states before the candidate's own
        yield from map(Lesson, losses, errors)

    def predictions(self, indices: Sequence[int], inputs: Tensor) -> Predictions:
        """Return the most likely tokens after each token. indices, inputs: as in `lessons`."""
        kept = Kept(self.predictions_path, RECORD, (inputs.shape[1], self.most_likely), self.least_free)
        records = kept.all(indices, inputs, self._predicted)
        return Predictions(
            torch.from_numpy(records["token"].astype(np.int64)), torch.from_numpy(records["log_probability"].copy())
        )

    def hidden_states(self, indices: Sequence[int], inputs: Tensor) -> Tensor:
        """Return the result of `normed` for the parent. indices, inputs: as in `lessons`."""
        shape = len(self.readers), inputs.shape[1], self.model.architecture.d_model
        kept = Kept(self.hidden_states_path, STREAM, shape, self.least_free)
        return torch.from_numpy(kept.all(indices, inputs, self._normed))

    @torch.no_grad()
    def _predicted(self, inputs: Tensor) -> Records:
        """Return records, sequences x T x tokens. inputs: sequences x T."""
        features, _ = self._passed(inputs)
        num = max(1, LOGITS_AT_A_TIME // (inputs.shape[1] * self.model.architecture.vocab_size))
        parts = []
        for some in torch.split(features, num):
            with bf16_products("cpu", enabled=self.lowered):
                logits = self.model.logits_of(some).float()  # sequences x T x vocab
            parts.append(functional.log_softmax(logits, dim=-1).topk(self.most_likely, dim=-1))
        values, tokens = (torch.cat(list(part)) for part in zip(*parts, strict=True))
        records = np.empty(tokens.shape, dtype=RECORD)
        records["token"], records["log_probability"] = tokens.numpy(), values.numpy()
        return records

    @torch.no_grad()
    def _normed(self, inputs: Tensor) -> Records:
        """Return records, sequences x layers x T x d_model. inputs: sequences x T."""
        _, hidden_states = self._passed(inputs)
        return self.normed(hidden_states).numpy()

    def _passed(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return features and hidden states; a step that lacks predictions and hidden states runs the model once."""
        if self._last is None or not self._last[0].equal(inputs):
            hidden_states: list[Tensor] = []
            with bf16_products("cpu", enabled=self.lowered):
                features, _ = self.model.features(inputs, with_entropies=False, hidden_states=hidden_states)
            self._last = inputs, features, hidden_states
        return self._last[1:]


@final
class LiveTeacher(Teacher):
    """A parent that runs beside the model it teaches. Nothing is stored; predictions cover the whole vocabulary.

    model: the parent, whose linears are converted to bf16 if `lowered`.
    lowered: whether factors of products are rounded to bf16; results of norms and logits are in fp32 either way, and
        the hidden states that a candidate is compared with in fp16.
    layer_function: calls a layer, such as compiled code.
    """

    def __init__(self, model: Decoder, *, lowered: bool, layer_function: LayerFunction = nn.Module.__call__) -> None:
        super().__init__(model)
        self.lowered, self.layer_function = lowered, layer_function
        for linear in model.modules() if lowered else ():
            if isinstance(linear, nn.Linear):  # a copy, since a tied token table stays in fp32
                for name, value in list(linear.named_parameters()):
                    setattr(linear, name, nn.Parameter(value.bfloat16(), requires_grad=False))
        self.table = padded(model.logits.weight.detach())

    def lessons(
        self, indices: Sequence[int], inputs: Tensor, num_parts: int, *, predictions: bool, hidden_states: bool
    ) -> Iterator[Lesson]:
        for part in inputs.chunk(num_parts):
            with torch.no_grad(), bf16_products(inputs.device.type, enabled=self.lowered):
                passed = [self.model.embedded(part)]
                for layer in self.model.layers:
                    passed.append(self.layer_function(layer, passed[-1], False)[0])
                features = self.model.read_out(passed[-1]).flatten(0, 1).to(self.table.dtype)  # rows x d_model
            with torch.no_grad():
                wanted = self.normed(passed) if hidden_states else None
            yield Lesson(
                partial(fully_distilled, parent_logits=partial(self._logits, features)) if predictions else None,
                None if wanted is None else partial(self.hidden_state_error, wanted),
            )

    @torch.no_grad()
    def _logits(self, features: Tensor, rows: slice) -> Tensor:
        logits = wide_product(features[rows], self.table.T)[:, : self.model.architecture.vocab_size]
        return capped(logits, self.model.logit_cap)


def teacher_of(parent: Parent, corpus: Corpus, recipe: Recipe, device: str) -> Teacher:
    """Return the parent as a teacher: on a GPU it runs with the model; on a CPU its outputs are cached.

    Predictions and hidden states each have a cache file in the corpus's folder. A file that would grow by more than a
    quarter of the free disk space is not used. Another seed's sequences may be in a file already, so it may grow by
    more than expected; nothing is added once the disk has less than half of what is free now. recipe: must have a
    distillation schedule.
    """
    lowered = recipe.precision == "bfloat16"
    if torch.device(device).type != "cpu":
        function = layer_function(recipe, device)
        return LiveTeacher(parent.decoder().to(device), lowered=lowered, layer_function=function)
    assert recipe.distillation is not None
    architecture, top_k = parent.model.architecture, recipe.distillation.teacher_top_k
    num_tokens = recipe.scale.seen_tokens
    ending = f"{parent.digest}-{recipe.scale.seq_len}-cpu{'-bf16' if lowered else ''}.bin"
    features = architecture.num_layers * architecture.d_model if recipe.distillation.hidden_state_weight else 0
    return CachedTeacher(
        parent.decoder(),
        top_k,
        _cache_path(corpus, f"likely-{top_k}-{ending}", num_tokens * top_k * RECORD.itemsize),
        _cache_path(corpus, f"hidden-states-{ending}", num_tokens * features * STREAM.itemsize),
        least_free=(1 - 2 * MOST_CACHED_SHARE) * disk_usage(corpus.folder).free,
        lowered=lowered,
    )


def _cache_path(corpus: Corpus, name: str, num_bytes: int) -> Path | None:
    """Return the path of a cache file, or None if what is still to be written to it would take too much disk."""
    path = Path(corpus.folder) / name
    written = path.stat().st_blocks * BLOCK_BYTES if path.exists() else 0  # its size counts gaps between records too
    return path if num_bytes - written <= MOST_CACHED_SHARE * disk_usage(corpus.folder).free else None
