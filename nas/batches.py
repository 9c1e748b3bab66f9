"""Which sequences a step trains on and which a rung validates on: functions of seed and step alone. And validation."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from nas.config import Scale
from nas.data import Corpus
from nas.model import Decoder


class Validation(NamedTuple):
    """loss: nats per token of the corpus' tokenizer. head_means: layers x heads, mean row entropies in nats."""

    loss: float
    head_means: Tensor


def num_chunks(num_tokens: int, seq_len: int) -> int:
    """Sequences of seq_len tokens, each with the token after it, that follow one another without overlap."""
    return (num_tokens - 1) // seq_len


def train_batch(corpus: Corpus, *, step: int, batch: int, seq_len: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of step 0, 1, ...: each batch x seq_len, int64.

    Every chunk comes once an epoch, in an order drawn anew from (seed, epoch).
    """
    tokens = corpus.tokens("train")
    chunks = num_chunks(len(tokens), seq_len)
    places = range(step * batch, (step + 1) * batch)
    indices = [int(_permutation(seed, place // chunks, chunks)[place % chunks]) for place in places]
    return _gather(tokens, indices, seq_len)


def validation_batches(corpus: Corpus, scale: Scale) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of about the scale's validation tokens, spread evenly over the validation split."""
    tokens, batch = corpus.tokens("validation"), scale.micro_batch
    chunks = num_chunks(len(tokens), scale.seq_len)
    wanted = max(1, min(chunks, scale.validation_tokens // scale.seq_len))
    indices = [index * chunks // wanted for index in range(wanted)]
    return [_gather(tokens, indices[start : start + batch], scale.seq_len) for start in range(0, wanted, batch)]


@torch.no_grad()
def validate(model: Decoder, corpus: Corpus, scale: Scale) -> Validation:
    """The model on the scale's validation tokens, the same for every model and seed."""
    device = model.embed.weight.device
    loss, count = 0.0, 0
    entropies = torch.zeros((), dtype=torch.float64, device=device)
    for inputs, targets in validation_batches(corpus, scale):
        logits, rows = model(inputs.to(device))
        mean = functional.cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten())
        loss += mean.item() * len(inputs)
        entropies = entropies + rows.double().mean(dim=-1).sum(dim=1)
        count += len(inputs)
    return Validation(loss / count, (entropies / count).cpu())


@lru_cache(maxsize=2)  # a batch spans two epochs at most
def _permutation(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(length)


def _gather(tokens: NDArray[np.unsignedinteger], indices: list[int], seq_len: int) -> tuple[Tensor, Tensor]:
    rows = np.stack([tokens[index * seq_len : (index + 1) * seq_len + 1] for index in indices])
    sequences = torch.from_numpy(rows.astype(np.int64))
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
