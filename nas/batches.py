"""Which sequences a step trains on and which a rung validates on: functions of seed and step alone."""

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nas.data import Corpus


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


def validation_batches(corpus: Corpus, *, num_tokens: int, batch: int, seq_len: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of about `num_tokens` tokens, spread evenly over the validation split."""
    tokens = corpus.tokens("validation")
    chunks = num_chunks(len(tokens), seq_len)
    wanted = max(1, min(chunks, num_tokens // seq_len))
    indices = [index * chunks // wanted for index in range(wanted)]
    return [_gather(tokens, indices[start : start + batch], seq_len) for start in range(0, wanted, batch)]


@lru_cache(maxsize=2)  # a batch spans two epochs at most
def _permutation(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(length)


def _gather(tokens: NDArray[np.unsignedinteger], indices: list[int], seq_len: int) -> tuple[Tensor, Tensor]:
    rows = np.stack([tokens[index * seq_len : (index + 1) * seq_len + 1] for index in indices])
    sequences = torch.from_numpy(rows.astype(np.int64))
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
