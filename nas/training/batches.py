"""Which sequences a step trains on and which a rung validates on: functions of seed and step alone. And validation."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nas.corpus.corpus import Corpus, require_chunks
from nas.corpus.documents import Split
from nas.model.cross_entropy import projected_cross_entropy
from nas.model.decoder import Decoder
from nas.recipe.recipe import Scale


class Validation(NamedTuple):
    """loss: nats per token of the corpus' tokenizer. head_means: of each layer its heads' mean row entropies, nats."""

    loss: float
    head_means: tuple[Tensor, ...]


def num_sequences(corpus: Corpus, split: Split, seq_len: int) -> int:
    """Sequences of seq_len tokens, each with the token after it, that share no target; as many as there are.

    Raises UserError if the corpus was cut into sequences of another length.
    """
    require_chunks(corpus, seq_len)
    length = corpus.num_train_tokens if split == "train" else corpus.num_validation_tokens
    return (length - 1) // seq_len if corpus.chunk_len is None else length // (seq_len + 1)


def train_batch(corpus: Corpus, *, step: int, batch: int, seq_len: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of step 0, 1, ...: each batch x seq_len, int64.

    Every sequence comes once an epoch, in an order drawn anew from (seed, epoch).
    """
    count = num_sequences(corpus, "train", seq_len)
    places = range(step * batch, (step + 1) * batch)
    indices = [int(_permutation(seed, place // count, count)[place % count]) for place in places]
    return _gather(corpus, "train", indices, seq_len)


def validation_batches(corpus: Corpus, scale: Scale) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of about the scale's validation tokens, spread evenly over the validation split."""
    batch, seq_len = scale.micro_batch, scale.seq_len
    count = num_sequences(corpus, "validation", seq_len)
    wanted = max(1, min(count, scale.validation_tokens // seq_len))
    indices = [index * count // wanted for index in range(wanted)]
    return [_gather(corpus, "validation", indices[start : start + batch], seq_len) for start in range(0, wanted, batch)]


@torch.no_grad()
def validate(model: Decoder, corpus: Corpus, scale: Scale) -> Validation:
    """The model on the scale's validation tokens, the same for every model and seed."""
    device = model.embed.weight.device
    loss, count = 0.0, 0
    sums: tuple[Tensor, ...] = tuple(torch.zeros((), dtype=torch.float64, device=device) for _ in model.layers)
    for inputs, targets in validation_batches(corpus, scale):
        stream, rows = model.features(inputs.to(device), with_entropies=True)
        assert rows is not None
        mean = projected_cross_entropy(stream.flatten(0, 1), model.logits.weight, targets.to(device).flatten())
        loss += mean.item() * len(inputs)
        sums = tuple(one + layer.double().mean(dim=-1).sum(dim=0) for one, layer in zip(sums, rows, strict=True))
        count += len(inputs)
    return Validation(loss / count, tuple((one / count).cpu() for one in sums))


@lru_cache(maxsize=2)  # a batch spans two epochs at most
def _permutation(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(length)


def _gather(corpus: Corpus, split: Split, indices: list[int], seq_len: int) -> tuple[Tensor, Tensor]:
    tokens = corpus.tokens(split)
    stride = seq_len if corpus.chunk_len is None else seq_len + 1
    rows = np.stack([tokens[index * stride : index * stride + seq_len + 1] for index in indices])
    sequences = torch.from_numpy(rows.astype(np.int64))
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
