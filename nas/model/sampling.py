"""Samples text from a model token by token, with cached keys and values."""

import torch
from torch import Tensor

from nas.model.decoder import Decoder
from nas.model.self_attention import Past

GREEDY_TOKENS = 3  # after the first, which is drawn uniformly; Liu et al. use 3 to 5


@torch.no_grad()
def sampled(
    model: Decoder,
    *,
    batch: int,
    length: int,
    vocab_size: int,
    temperature: float,
    generator: torch.Generator,
    begin: int | None = None,
) -> Tensor:
    """Sample sequences from a model without any prompt: batch x length token ids.

    The first token is uniform over the first `vocab_size` entries, the next GREEDY_TOKENS are the most likely ones, and
    all others are drawn at the temperature. begin: the token that begins every text, which is not returned.

    Source: Liu et al. 2023, arXiv 2305.17888, section 3.1. Raises UserError as `Decoder.step` does.
    """
    tokens = torch.randint(vocab_size, (batch,), generator=generator)
    made, past, device = [tokens], Past(), model.embed.weight.device
    if begin is not None:
        model.step(torch.full_like(tokens, begin).to(device), past)
    for position in range(length - 1):
        logits = model.step(made[-1].to(device), past)[:, :vocab_size].float().cpu()
        if position < GREEDY_TOKENS:
            made.append(logits.argmax(dim=-1))
        else:
            shares = (logits / temperature).softmax(dim=-1)
            made.append(torch.multinomial(shares, 1, generator=generator)[:, 0])
    return torch.stack(made, dim=1)
