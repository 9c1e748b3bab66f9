"""Loss and attention entropy of a model on the validation split."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nas.batches import validation_batches
from nas.config import Scale
from nas.data import Corpus
from nas.model import Decoder


class Validation(NamedTuple):
    """loss: nats per token of the corpus' tokenizer. head_means: layers x heads, mean row entropies in nats."""

    loss: float
    head_means: Tensor


@torch.no_grad()
def validate(model: Decoder, corpus: Corpus, scale: Scale) -> Validation:
    """The model on the scale's validation tokens, the same for every model and seed."""
    device = model.embed.weight.device
    loss, count = 0.0, 0
    entropies = torch.zeros((), dtype=torch.float64, device=device)
    for inputs, targets in validation_batches(
        corpus, num_tokens=scale.validation_tokens, batch=scale.micro_batch, seq_len=scale.seq_len
    ):
        logits, rows = model(inputs.to(device))
        mean = functional.cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten())
        loss += mean.item() * len(inputs)
        entropies = entropies + rows.double().mean(dim=-1).sum(dim=1)
        count += len(inputs)
    return Validation(loss / count, (entropies / count).cpu())
