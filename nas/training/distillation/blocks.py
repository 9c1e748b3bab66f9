"""Initial weights of sub-layers that may replace a parent's, and their training on the parent's hidden states.

A sub-layer is trained on its own (`trained_block`) or together with others (`trained_together`). In the second case the
parent runs once per training step, and sub-layers of one shape are a single module with stacked weights.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nas.attention.causal import causal_attention
from nas.attention.reference import attention_reference
from nas.conversion.linear_fit import fit_linear, fit_polynomial, fit_queries, weights_by_position
from nas.conversion.parent import Parent
from nas.conversion.transfer import transferred
from nas.corpus.corpus import Corpus
from nas.model.bf16_products import bf16_products
from nas.model.decoder import TRAINED
from nas.model.layers import Block
from nas.model.norms import follow_deviations, frozen_norms
from nas.model.settings import layer_settings
from nas.model.weights import load_deployed
from nas.recipe.distillation import KINDS, fitted_degree
from nas.training.batches import train_batch
from nas.training.distillation.parts import modules_of
from nas.training.distillation.sub_layers import SubLayer

RATE_WIDTH = 96  # width of the parent with which the learning rates were chosen
FIT_ROWS = 8  # an FFN is fitted over this many tokens per row of a weight of d_model rows


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockwiseDistillation:
    """Settings for training sub-layers by AdamW at a constant learning rate.

    tokens: training tokens of each sub-layer; more are used if they would give fewer than `least_steps` steps.
    batch: sequences per step; fewer are used if `tokens` would otherwise give fewer than `least_steps` steps.
    polynomial_rate, power8_rate: learning rates for quadratic activations and eighth powers, which are first fitted to
        the parent; larger steps undo the fit (`rate_of`). learning_rate: for the others.
    freezing_share: share of the steps before frozen norms are frozen.
    lowered: whether the factors of matrix products are rounded to bf16 (on a CPU only; fits are in fp32).
    """

    tokens: int = 32_768
    batch: int = 8
    least_steps: int = 32  # with 4, the rank correlation of scores and trainings on the proxy is 0.44, not 0.64
    learning_rate: float = 1e-3
    polynomial_rate: float = 2e-5
    power8_rate: float = 1e-4
    freezing_share: float = 0.25
    lowered: bool = False

    def rate_of(self, parent: Parent, sub_layer: SubLayer) -> float:
        """Return the learning rate for a sub-layer that replaces one of the parent's.

        A linear gate fits the parent badly, so it gets `learning_rate`, the largest. Errors on held-out hidden
        states at three layers of SmolLM2, without training (rate 0) and after 64 steps of 512 tokens (squared gates
        were then fitted to 512 tokens, without weights):

            rate                    0      1e-4   2.5e-4  5e-4   1e-3
            squared gates, layer 2  0.132  0.073  0.055   0.056  0.057
                           layer 6  0.004  0.002  0.002   0.003  0.005
                          layer 20  0.010  0.006  0.009   0.018  0.038
            eighth powers, layer 2  0.069  0.011  0.016*  0.036  0.040     *: 2e-4

        A sub-layer that keeps the parent's form and has a norm starts near the parent's function, so its rate falls
        with the width above RATE_WIDTH. KL of Gemma 3 270M (width 640, 4,096 tokens; builtin parent: best at 1e-3):

            rate                                   0      1e-4   1e-3
            frozen norm, attention, layers 0 and 8  0.000  0.001  0.114;  0.147  0.020  0.186
            frozen norm, FFN, layers 0 and 8        0.004  0.014  0.176;  0.001  0.004  0.373

        Source: Yang et al. 2022, Tensor Programs V, arXiv 2203.03466, table 3: Adam's rates go as 1 / width.
        """
        if sub_layer.form == "power8":
            return self.power8_rate
        source = parent.model.architecture
        theirs = source.layers[sub_layer.depth]
        if sub_layer.norm != "none" and sub_layer.form == getattr(theirs, sub_layer.part):
            return self.learning_rate * min(1.0, RATE_WIDTH / source.d_model)
        degree = fitted_degree(sub_layer.form, theirs, source)
        return self.polynomial_rate if degree is not None and degree > 1 else self.learning_rate

    def batch_of(self, seq_len: int) -> int:
        """Return the number of sequences per step, at least 1."""
        return max(1, min(self.batch, self.tokens // (self.least_steps * seq_len)))

    def num_steps(self, seq_len: int) -> int:
        """Return the number of optimizer steps, at least `least_steps`."""
        return max(self.least_steps, self.tokens // (self.batch_of(seq_len) * seq_len))


DEFAULT = BlockwiseDistillation()


class HiddenStates(NamedTuple):
    """Input (`read`) and output (`left`) of a layer of the parent, each steps x batch x T x d_model."""

    read: Tensor
    left: Tensor


def trained_block(
    parent: Parent, sub_layer: SubLayer, hidden_states: HiddenStates, settings: BlockwiseDistillation
) -> Block:
    """Return the parent's layer with `sub_layer` in it, which is trained to give the output in `hidden_states`."""
    block = fitted_block(parent, sub_layer, hidden_states)
    moved = [value for value in block.parameters() if value.requires_grad]
    if not moved:
        return block
    optimizer = torch.optim.AdamW(moved, lr=settings.rate_of(parent, sub_layer), weight_decay=0.0)
    for step, (read, left) in enumerate(zip(*hidden_states, strict=True)):
        if step >= settings.freezing_share * len(hidden_states.read):
            freeze(block)
        with bf16_products(read.device.type, enabled=settings.lowered):
            made, _ = block(read, False)
        error = distillation_error(made, read, left)
        optimizer.zero_grad()
        torch.autograd.backward(error)
        optimizer.step()
        follow_deviations(block)
    return block


def fitted_block(parent: Parent, sub_layer: SubLayer, hidden_states: HiddenStates) -> Block:
    """Return the parent's layer with `sub_layer` in it, untrained; only the sub-layer requires gradients.

    A linear FFN, and a polynomial in place of the parent's activation, start at the least-squares fit to the parent's
    layer; queries for eighth powers in place of another softmax start at the length that fits best. Other forms start
    with the weights of `nas.conversion.transfer`. FFNs are fitted over the first `steps_to_fit` steps of
    `hidden_states`, and queries over the first.
    """
    theirs, device = parent.model.architecture.layers[sub_layer.depth], hidden_states.read.device
    block = _untrained(parent, sub_layer).to(device)
    degree = fitted_degree(sub_layer.form, theirs, parent.model.architecture)
    read, left = (stream[: steps_to_fit(stream)].flatten(0, 1) for stream in hidden_states)
    if sub_layer.form == "fused":
        fit_linear(block, read, left)
    elif degree:
        original = SubLayer(sub_layer.depth, "ffn", theirs.norm2, theirs.ffn)
        fit_polynomial(block, _untrained(parent, original).eval().to(device), read, left, degree)
    elif sub_layer.form == "power8" and theirs.attention not in ("power8", "none"):
        original = SubLayer(sub_layer.depth, "attention", theirs.norm1, theirs.attention)
        fit_queries(block, _untrained(parent, original).eval().to(device), hidden_states.read[0])
    block.requires_grad_(False)
    for part in modules_of(block, sub_layer.part):
        part.requires_grad_()
    return block


def steps_to_fit(stream: Tensor) -> int:
    """Return the number of steps with at least FIT_ROWS x d_model tokens. stream: steps x batch x T x d_model."""
    return -(-FIT_ROWS * stream.shape[-1] // stream[0, :, :, 0].numel())


def freeze(block: Block) -> None:
    """Freeze each `FrozenNorm` of a block that is not frozen yet."""
    for norm in frozen_norms(block).values():
        if not norm.is_frozen:
            norm.set_frozen()


def _untrained(parent: Parent, sub_layer: SubLayer) -> Block:
    source, depth = parent.model.architecture, sub_layer.depth
    layers = list(source.layers)
    norm, form, *_, inner = KINDS[sub_layer.part]
    chosen: dict[str, Any] = {norm: sub_layer.norm, form: sub_layer.form, inner: sub_layer.inner}
    layers[depth] = replace(layers[depth], **chosen)
    target = replace(source, layers=tuple(layers))
    block, prefix = Block(**layer_settings(target, depth), parts=TRAINED), f"layers.{depth}."
    weights = transferred(source, parent.model.weights, target)
    load_deployed(block, {n.removeprefix(prefix): value for n, value in weights.items() if n.startswith(prefix)})
    return block


def distillation_error(made: Tensor, read: Tensor, left: Tensor) -> Tensor:
    """Return a layer's mean squared error relative to what the parent's layer adds to the stream: a scalar.

    The error at each position is divided by the mean square of `left - read` there, since the first position's numbers
    are far larger. made: the layer's output. read, left: input and output of the parent's layer, batch x T x d_model.
    """
    return ((made - left).square().mean(dim=(0, 2)) * weights_by_position(read, left)).mean()


def trained_together(
    parent: Parent,
    sub_layers: Sequence[SubLayer],
    corpus: Corpus,
    settings: BlockwiseDistillation,
    *,
    seq_len: int,
    device: str,
) -> dict[SubLayer, Block]:
    """Train sub-layers at the same time on a device; return, for each, the parent's layer with the sub-layer in it."""
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
    alike: dict[Hashable, dict[SubLayer, Block]] = {}  # by shape: blocks that can be stacked
    for sub_layer, block in blocks.items():
        if any(value.requires_grad for value in block.parameters()):
            shape = (
                sub_layer[1:],
                parent.model.architecture.layers[sub_layer.depth],
                tuple((name, value.shape) for name, value in chain(block.named_parameters(), block.named_buffers())),
                tuple(norm.is_frozen for norm in frozen_norms(block).values()),
            )
            alike.setdefault(shape, {})[sub_layer] = block
    stacks = [_Stack(group, settings.rate_of(parent, next(iter(group)))) for group in alike.values()]
    for step in range(num_steps):
        streams = hidden_states(step)
        for stack in stacks:
            stack.step(streams, freezing=step >= settings.freezing_share * num_steps)
    for stack in stacks:
        stack.unstack()
    return blocks


class _Stack:
    """Blocks of one shape in training, as one module with stacked weights."""

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
        run = torch.vmap(partial(torch.func.functional_call, self.blocks[0]))
        errors = run((self.parameters, self.buffers), (read, left))
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
        follow_deviations(self.block)
        return error
