"""Training batches, which depend only on corpus, sizes, seed and step; validation batches; validation of a model."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from costmodel.errors import UserError
from nas.corpus.corpus import Corpus, require_chunks
from nas.corpus.sequences import DocumentLoss, epoch_order, gather, held_out_targets, mean_loss, num_sequences
from nas.model.cross_entropy import token_cross_entropies
from nas.model.decoder import Decoder, log_probabilities
from nas.model.onednn import onednn_linears
from nas.recipe.candidate import Candidate
from nas.recipe.recipe import Scale
from nas.training.outcome import Agreement

T = TypeVar("T")

COMPARED = 16_384  # validation tokens on which a model is compared with its parent
AHEAD = 2  # batches that are made in advance: one is being made while another waits


class Validation(NamedTuple):
    """Result of a validation.

    loss: nats per token, the weighted mean over documents. head_means: mean row entropy of each head in nats, a tensor
        per layer. documents: weight in the loss, and nats per token, of each document.
    """

    loss: float
    head_means: tuple[Tensor, ...]
    documents: tuple[DocumentLoss, ...] = ()


def train_batch(corpus: Corpus, *, step: int, batch: int, seq_len: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of step 0, 1, ...: each batch x seq_len, int64."""
    indices = train_indices(corpus, step=step, batch=batch, seq_len=seq_len, seed=seed)
    return _split(gather(corpus, "train", indices, seq_len))


def train_indices(corpus: Corpus, *, step: int, batch: int, seq_len: int, seed: int) -> list[int]:
    """Return the indices of the training sequences of `step`, from 0.

    Every epoch has each sequence once, in an order that depends on seed and epoch.
    """
    count = num_sequences(corpus, "train", seq_len)
    places = range(step * batch, (step + 1) * batch)
    return [int(epoch_order(seed, place // count, count)[place % count]) for place in places]


def validation_batches(corpus: Corpus, scale: Scale, tokens: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of inputs and targets, each at most micro_batch x seq_len. tokens: as in `validate`."""
    batch, seq_len = scale.micro_batch, scale.seq_len
    targets = held_out_targets(corpus, seq_len, tokens or scale.validation_tokens)
    sequences = gather(corpus, "validation", targets.indices, seq_len)
    return [_split(sequences[start : start + batch]) for start in range(0, len(sequences), batch)]


class Prefetched(Generic[T]):
    """A function of a step that returns `make(step)`, or raises its error, while a thread makes the AHEAD next ones."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._started: dict[int, Future[T]] = {}

    def __call__(self, step: int) -> T:
        for wanted in range(step, step + 1 + AHEAD):
            if wanted not in self._started:
                self._started[wanted] = self._thread.submit(self._make, wanted)
        return self._started.pop(step).result()

    def close(self) -> None:
        """Stop making batches, without waiting for the one in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)


@onednn_linears()
def validate(model: Decoder, corpus: Corpus, scale: Scale, tokens: int | None = None) -> Validation:
    """Validate a model on about `tokens` tokens (None: the scale's number), the same for every model and seed."""
    device = model.embed.weight.device
    targets_of = held_out_targets(corpus, scale.seq_len, tokens or scale.validation_tokens)
    losses: list[NDArray[np.float64]] = []
    sums: tuple[Tensor, ...] = tuple(torch.zeros((), dtype=torch.float64, device=device) for _ in model.layers)
    for inputs, targets in validation_batches(corpus, scale, tokens):
        stream, rows = model.features(inputs.to(device), with_entropies=True)
        assert rows is not None
        hidden, cap = stream.flatten(0, 1), model.architecture.logit_cap
        nats = token_cross_entropies(hidden, model.logits.weight, targets.to(device).flatten(), cap)
        losses.append(nats.double().cpu().numpy())
        sums = tuple(total + layer.double().mean(dim=-1).sum(dim=0) for total, layer in zip(sums, rows, strict=True))
    documents = targets_of.by_document(np.concatenate(losses))
    count = len(targets_of.indices)
    return Validation(mean_loss(documents), tuple((total / count).cpu() for total in sums), documents)


@onednn_linears()
def agreement(model: Decoder, parent: Decoder, corpus: Corpus, scale: Scale) -> Agreement:
    """Compare a model with its parent, on one device, on COMPARED validation tokens or, if fewer, those of `scale`."""
    device, divergence, num_equal, count = model.embed.weight.device, 0.0, 0, 0
    for inputs, _ in validation_batches(corpus, scale, min(COMPARED, scale.validation_tokens)):
        for _, (mine, wanted) in log_probabilities(model, parent, tokens=inputs.to(device)):
            divergence += functional.kl_div(mine, wanted, reduction="sum", log_target=True).item()
            num_equal += int((mine.argmax(dim=-1) == wanted.argmax(dim=-1)).sum())
        count += inputs.numel()
    return Agreement(divergence / count, num_equal / count)


def _split(sequences: NDArray[np.unsignedinteger[Any]]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each rows x seq_len, of sequences that include the next token."""
    tokens = torch.from_numpy(sequences.astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def check(candidate: Candidate, corpus: Corpus) -> None:
    """Raise UserError if the corpus has no sequences of the recipe's length, or a larger vocabulary than the model."""
    scale, vocab_size = candidate.recipe.scale, candidate.trained.vocab_size
    require_chunks(corpus, scale.seq_len)
    if corpus.vocab_size > vocab_size:
        raise UserError(
            f"the model's vocabulary must cover the tokenizer's, but got {vocab_size} < {corpus.vocab_size} "
            f"({corpus.tokenizer}); prepare the corpus with at most {vocab_size} tokens."
        )
