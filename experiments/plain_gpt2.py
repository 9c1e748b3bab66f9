"""A training step of a plain GPT-2, as users of PyTorch write it, with which the toolkit's own training is compared."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from search_spaces.architecture import Architecture

MULTIPLE = 128  # GPUs are fast if the rows of a token table are a multiple of this


class _Layer(nn.Module):
    def __init__(self, width: int, inner: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, stream: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(stream)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each batch x heads x T x features
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + self.out(mixed.transpose(1, 2).flatten(2))
        inner = functional.gelu(self.up(self.norm2(stream)), approximate="tanh")
        return torch.add(stream, self.down(inner))


class PlainGpt2(nn.Module):
    """GPT-2 with tied embeddings; its forward pass returns the loss. vocab_size: rows of the token table."""

    def __init__(self, dimensions: Architecture, vocab_size: int) -> None:
        super().__init__()
        width = dimensions.d_model
        self.tokens, self.positions = nn.Embedding(vocab_size, width), nn.Embedding(dimensions.context, width)
        layers = (_Layer(width, dimensions.d_ff, dimensions.num_heads) for _ in dimensions.layers)
        self.layers, self.norm = nn.Sequential(*layers), nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per token. inputs, targets: token ids, batch x T."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        stream = self.norm(self.layers(self.tokens(inputs) + self.positions(positions)))
        logits = functional.linear(stream, self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_step(
    dimensions: Architecture, *, batch: int, seq_len: int, device: str, compiled: bool
) -> Callable[[], Tensor]:
    """Return a function that takes a training step on random tokens and returns the loss, without waiting for the GPU.

    On a GPU, products are in bfloat16, and the token table has a multiple of 128 rows. compiled: by torch.compile.
    """
    torch.manual_seed(0)
    vocab_size, is_cuda = dimensions.vocab_size, torch.device(device).type == "cuda"
    model = PlainGpt2(dimensions, -(-vocab_size // MULTIPLE) * MULTIPLE if is_cuda else vocab_size).to(device)
    loss_of = torch.compile(model, dynamic=False) if compiled else model
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    inputs, targets = torch.randint(vocab_size, (2, batch, seq_len), device=device)

    def step() -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=is_cuda):
            loss: Tensor = loss_of(inputs, targets)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
