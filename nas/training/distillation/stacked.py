"""Trains alternatives of all layers in one pass: those of one shape as a single module with stacked weights.

The parent runs once over the batch of a step, and every alternative takes its step on the input and output of its
layer. Alternatives are independent, so each is trained as `nas.training.distillation.blocks` trains it alone.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from nas.attention.causal import attention_reference, causal_attention
from nas.conversion.parent import Parent
from nas.corpus.corpus import Corpus
from nas.model.decoder import Block
from nas.model.norms import followed_deviations, frozen_norms
from nas.training.batches import train_batch
from nas.training.distillation.blocks import (
    BlockwiseDistillation,
    HiddenStates,
    distillation_error,
    fitted_block,
    freeze,
    rate_of,
    steps_to_fit,
)
from nas.training.distillation.sub_layers import SubLayer


def trained_together(
    parent: Parent,
    sub_layers: Sequence[SubLayer],
    corpus: Corpus,
    settings: BlockwiseDistillation,
    *,
    seq_len: int,
    device: str,
) -> dict[SubLayer, Block]:
    """Return the trained blocks of these sub-layers on a device."""
    model, num_steps, batch = parent.decoder().to(device), settings.num_steps(seq_len), settings.batch_of(seq_len)

    @torch.no_grad()
    def hidden_states(step: int) -> Tensor:
        """Return the input of every layer and the output of the last, (layers + 1) x batch x T x d_model."""
        inputs, _ = train_batch(corpus, step=step, batch=batch, seq_len=seq_len, seed=0)
        return torch.stack(model.hidden_states(inputs.to(device)))

    num_fit = min(num_steps, steps_to_fit(hidden_states(0)[:1]))
    first = torch.stack([hidden_states(step) for step in range(num_fit)], dim=1)  # layers + 1 x steps x batch x T x d
    blocks = {
        sub_layer: fitted_block(parent, sub_layer, HiddenStates(first[sub_layer.depth], first[sub_layer.depth + 1]))
        for sub_layer in sub_layers
    }
    alike: dict[Hashable, dict[SubLayer, Block]] = {}
    for sub_layer, block in blocks.items():
        if any(value.requires_grad for value in block.parameters()):
            alike.setdefault(_shape_of(parent, sub_layer, block), {})[sub_layer] = block
    stacks = [_Stack(group, rate_of(parent, next(iter(group)), settings)) for group in alike.values()]
    for step in range(num_steps):
        streams = hidden_states(step)
        for stack in stacks:
            stack.step(streams, freezing=step >= settings.freezing_share * num_steps)
    for stack in stacks:
        stack.unstack()
    return blocks


def _shape_of(parent: Parent, sub_layer: SubLayer, block: Block) -> Hashable:
    """Return a key that is equal for blocks that differ only in numbers: forms, layers, tensors and frozen norms."""
    tensors = chain(block.named_parameters(), block.named_buffers())
    return (
        sub_layer[1:],
        parent.model.architecture.layers[sub_layer.depth],
        tuple((name, value.shape) for name, value in tensors),
        tuple(norm.is_frozen for norm in frozen_norms(block).values()),
    )


class _Stack:
    """Blocks of one shape in training."""

    def __init__(self, blocks: Mapping[SubLayer, Block], rate: float) -> None:
        self.blocks = [_Trained(block) for block in blocks.values()]
        self.parameters, self.buffers = torch.func.stack_module_state(self.blocks)
        moved = [value for value in self.parameters.values() if value.requires_grad]
        self.depths = torch.tensor([sub_layer.depth for sub_layer in blocks], device=moved[0].device)
        self.optimizer = torch.optim.AdamW(moved, lr=rate, weight_decay=0.0)

    def step(self, streams: Tensor, *, freezing: bool) -> None:
        """Take one step. streams: layers + 1 x batch x T x d_model. freezing: whether to freeze the norms now."""
        if freezing:
            freeze(self.blocks[0].block)
        read, left = streams[self.depths], streams[self.depths + 1]
        errors = torch.vmap(partial(torch.func.functional_call, self.blocks[0]))(
            (self.parameters, self.buffers), (read, left)
        )
        self.optimizer.zero_grad()
        torch.autograd.backward(errors.sum())
        self.optimizer.step()

    @torch.no_grad()
    def unstack(self) -> None:
        """Write the trained weights into the blocks."""
        stacked = self.parameters | self.buffers
        frozen = [norm.is_frozen for norm in frozen_norms(self.blocks[0]).values()]
        for index, trained in enumerate(self.blocks):
            for name, value in trained.state_dict().items():
                value.copy_(stacked[name][index])
            for norm, is_frozen in zip(frozen_norms(trained).values(), frozen, strict=True):
                norm.set_frozen(is_frozen)


class _Trained(nn.Module):
    """A block that returns its error, and updates the deviations of norms that are not frozen yet."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, read: Tensor, left: Tensor) -> Tensor:
        attention: Any = self.block.attention
        attend = getattr(attention, "attend", None)
        if attend is causal_attention:  # vmap does not support its kernels
            attention.attend = attention_reference
        error = distillation_error(self.block(read, False)[0], read, left)
        if attend is causal_attention:
            attention.attend = attend
        followed_deviations(self.block)
        return error
