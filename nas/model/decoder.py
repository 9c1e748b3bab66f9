"""The decoder that a candidate trains; its modules are those of the op graph that `search_spaces.lower` makes.

A module with weights has the name of its node: `layers.3.attention.qkv.weight` in a state dict is the weight of node
`layers.3.attention.qkv`. Linear weights are out_features x in_features, as in torch.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from costmodel import ops
from costmodel.errors import UserError
from costmodel.ops import GeluForm, Op
from nas.model.bf16_products import are_lowered, wide_linear
from nas.model.cross_entropy import capped
from nas.model.mpc_friendly import PiecewiseGelu, query_scale
from nas.model.norms import inner_norm, norm_of
from nas.model.self_attention import SelfAttention, ShapedSelfAttention
from nas.recipe.recipe import SlopeSharing
from search_spaces.architecture import Architecture, Layer, has_bias, num_heads, softmax_form
from search_spaces.forms import FFNS
from search_spaces.inner import queries, score_cap
from search_spaces.lower import activation_ops

INIT_STD = 0.02  # Radford et al. 2019, GPT-2, at its smallest width
INIT_WIDTH = 768
MAX_TABLE_STD = 0.16  # from the rule at width 96; in narrower models, larger tables would predict their own tokens
LEAKY_SLOPE_INIT = 1e-2  # arXiv 2501.03489, leaky ReLU study

# Calls a layer with its stream and whether entropies are wanted, as `Block.forward`.
LayerFunction: TypeAlias = Callable[[nn.Module, Tensor, bool], Any]


class Prediction(NamedTuple):
    """Logits, batch x T x vocab, and, if wanted, entropies of each layer in nats, batch x heads x T, one per row.

    A layer without attention has 0 heads.
    """

    logits: Tensor
    entropies: tuple[Tensor, ...] | None


class Decoder(nn.Module):
    """A decoder-only language model. Raises UserError if its block would rotate an odd number of features."""

    def __init__(self, architecture: Architecture, *, temperature_init: float = 1.0) -> None:
        super().__init__()
        d_model, vocab_size = architecture.d_model, architecture.vocab_size
        self.architecture = architecture
        self.recompute = False  # whether the backward pass computes layers again instead of storing activations
        self.layer_function: LayerFunction = nn.Module.__call__  # calls layers in training; may be compiled
        self.embed = nn.Embedding(vocab_size, d_model)
        has_table = "position" in architecture.block_facts.tables
        self.position = nn.Embedding(architecture.context, d_model) if has_table else None
        num_layers = architecture.num_layers
        self.layers = nn.ModuleList(Block(architecture, index, temperature_init) for index in range(num_layers))
        self.final_norm = norm_of(architecture.final_norm, architecture)
        self.logits = nn.Linear(d_model, vocab_size, bias=False)
        if architecture.tied_embeddings:
            self.logits.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, with_entropies: bool = True) -> Prediction:
        """Return logits and entropies. tokens: batch x T. Without entropies attention is faster.

        Raises UserError if T is above the architecture's context.
        """
        stream, entropies = self.features(tokens, with_entropies=with_entropies)
        return Prediction(self.logits_of(stream), entropies)

    def logits_of(self, features: Tensor) -> Tensor:
        """Return the logits, batch x T x vocab, of features that `features` returned."""
        is_wide = are_lowered(features.device.type) and not torch.is_grad_enabled()
        logits = wide_linear(features, self.logits.weight) if is_wide else self.logits(features)
        return capped(logits, self.architecture.logit_cap)

    def features(
        self, tokens: Tensor, *, with_entropies: bool, hidden_states: list[Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Return the input of the vocabulary projection, batch x T x d_model, and the entropies; else as `forward`.

        hidden_states: a list that gets the input of each layer and the output of the last.
        """
        stream = self.embedded(tokens)  # batch x T x d_model
        passed, entropies = [stream], []
        for layer in self.layers:
            if not torch.is_grad_enabled():
                stream, entropy = layer(stream, with_entropies)
            elif self.recompute:
                stream, entropy = _recomputed(layer, stream, with_entropies)
            else:
                stream, entropy = self.layer_function(layer, stream, with_entropies)
            entropies.append(entropy)  # batch x heads x T
            passed.append(stream)
        if hidden_states is not None:
            hidden_states += passed
        return self.read_out(stream), tuple(entropies) if with_entropies else None

    def read_out(self, stream: Tensor) -> Tensor:
        """Return the input of the vocabulary projection. stream: the output of the last layer."""
        normed: Tensor = self.final_norm(stream)
        return normed if self.architecture.logit_scale == 1 else normed * self.architecture.logit_scale

    def hidden_states(self, tokens: Tensor) -> list[Tensor]:
        """Return the input of every layer and the output of the last, each batch x T x d_model."""
        hidden_states: list[Tensor] = []
        self.features(tokens, with_entropies=False, hidden_states=hidden_states)
        return hidden_states

    def step(self, tokens: Tensor, position: int, past: list[list[Tensor]]) -> Tensor:
        """Return the logits after one more token of each sequence, batch x vocab, and add it to the past.

        tokens: batch, at the same position. Else as `continued`.
        """
        return self.logits_of(self.continued(tokens[:, None], position, past))[:, 0]

    def continued(self, tokens: Tensor, position: int, past: list[list[Tensor]]) -> Tensor:
        """Return the input of the vocabulary projection for more tokens of each sequence, and add them to the past.

        tokens: batch x T, from the same position on. past: keys and values of each layer (`SelfAttention.step`).

        Raises UserError beyond the context, or for a shaped block, which has no keys and values to keep.
        """
        if self.architecture.block_facts.is_shaped:
            raise UserError(
                f"block {self.architecture.block!r} keeps no keys and values, so it cannot continue a text."
            )
        stream = self.embedded(tokens, position)
        for layer, its_past in zip(self.layers, past, strict=True):
            stream, _ = layer(stream, False, its_past)
        return self.read_out(stream)

    def embedded(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Return the input of the first layer; else as `forward`. first: the position of the first token."""
        if first + tokens.shape[1] > self.architecture.context:
            why = " (beyond it attention has windows)" if self.architecture.longest_context else ""
            raise UserError(
                f"a sequence must not be longer than the model's context, but got {first + tokens.shape[1]} tokens, "
                f"context={self.architecture.context}{why}."
            )
        stream: Tensor = self.embed(tokens)
        stream = stream if self.architecture.embedding_scale == 1 else stream * self.architecture.embedding_scale
        return stream if self.position is None else stream + self.position.weight[first : first + tokens.shape[1]]


def _recomputed(layer: nn.Module, stream: Tensor, with_entropy: bool) -> Any:
    """Run a layer that stores only its input for the backward pass."""
    return checkpoint(
        layer, stream, with_entropy, use_reentrant=False, context_fn=lambda: (nullcontext(), _observed(layer))
    )


@contextmanager
def _observed(layer: nn.Module) -> Iterator[None]:
    """Run a layer in evaluation mode, since norms that are not frozen yet have recorded this stream already."""
    was_training = layer.training
    layer.eval()
    try:
        yield
    finally:
        layer.train(was_training)


class Block(nn.Module):
    """Attention and FFN of one layer, joined as `search_spaces.block` says; a missing one adds nothing."""

    def __init__(self, architecture: Architecture, index: int, temperature_init: float) -> None:
        super().__init__()
        layer, self.block = architecture.layers[index], architecture.block_facts
        self.scale, self.score_cap = architecture.residual_scale, score_cap(architecture, layer)
        self.queries = queries(architecture, layer)
        affine = not architecture.folded or self.block.passes_values(index)  # else linears include gain and bias
        self.norm1 = norm_of(layer.norm1, architecture, affine=affine)
        attention = ShapedSelfAttention if self.block.is_shaped else SelfAttention
        self.attention = None if layer.attention == "none" else attention(architecture, index, temperature_init)
        self.norm2 = norm_of(layer.norm2, architecture, affine=not architecture.folded)
        self.ffn = None if layer.ffn == "none" else FeedForward(architecture, layer)
        self.gates: dict[str, float | Tensor] = {}  # factors of `attention` and `ffn` while they are gradually removed

    def forward(
        self, stream: Tensor, with_entropy: bool = True, past: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the stream after the layer and the entropies, of 0 heads without attention.

        past: keys and values of the tokens before these; there are no entropies then.
        """
        if self.attention is None:
            joined, entropy = stream, stream.new_zeros(len(stream), 0, stream.shape[1]) if with_entropy else None
        else:
            source = self.norm1(stream)
            if past is None:
                attended, entropy = self.attention(source, with_entropy)
            else:
                assert isinstance(self.attention, SelfAttention)
                attended, entropy = self.attention.step(source, past), None
            attended = self.gates["attention"] * attended if "attention" in self.gates else attended
            attended = attended if self.scale == 1 else attended * self.scale
            joined = attended if self.block.is_shaped else stream + attended
        if self.ffn is not None:
            made = self.ffn(self.norm2(stream if self.block.join == "parallel" else joined), joined)
            joined = joined.lerp(made, self.gates["ffn"]) if "ffn" in self.gates else made
        return joined, entropy

    @torch.no_grad()
    def scale_queries(self, factors: Tensor) -> Tensor:
        """Multiply the queries of each head by its factor. factors: one per head.

        Returns the factors that were used: their geometric mean if the heads share the gain of a norm.
        """
        assert self.attention is not None
        scaled = self.get_submodule(self.queries)
        if isinstance(scaled, nn.RMSNorm) and self.block.query_key_norm == "head":
            factors = factors.log().mean().exp().expand_as(factors)
            scaled.weight.mul_(factors[0])
            return factors
        for value in scaled.parameters():
            rows = value[: len(factors) * self.attention.head_dim]
            rows.mul_(factors.repeat_interleave(self.attention.head_dim).view(-1, *[1] * (value.dim() - 1)))
        return factors


class FeedForward(nn.Module):
    """An FFN that is added to the stream: two linears around an activation, maybe with a gate, or one fused linear."""

    def __init__(self, architecture: Architecture, layer: Layer) -> None:
        super().__init__()
        d_model, d_ff = architecture.d_model, architecture.d_ff

        def linear(name: str, in_features: int, out_features: int) -> nn.Linear:
            return nn.Linear(in_features, out_features, bias=has_bias(architecture, layer, f"ffn.{name}"))

        self.fused = linear("fused", d_model, d_model) if layer.ffn == "fused" else None
        self.gate = linear("gate", d_model, d_ff) if FFNS[layer.ffn].is_gated else None
        if self.fused is None:
            self.up = linear("up", d_model, d_ff)
            made = [MODULES[type(op)](op) for op in activation_ops(architecture, layer, 1).values()]
            self.activation = made[0] if len(made) == 1 else nn.Sequential(*made)
            self.down = linear("down", d_ff, d_model)
        self.scale = architecture.residual_scale
        self.norm = inner_norm(architecture, layer, "ffn.norm")
        self.residual = _ScaledAdd(architecture.block_facts.branch_gain) if layer.stabiliser == "scaled" else None

    def forward(self, source: Tensor, stream: Tensor) -> Tensor:
        """Return the stream with the FFN's output added. source: input of the FFN; both batch x T x d_model."""
        if self.fused is not None:
            branch = self.fused(source)
        else:
            up = self.up(source)  # batch x T x d_ff
            branch = self.down(self.activation(up) if self.gate is None else self.activation(self.gate(source)) * up)
        branch = branch if self.norm is None else self.norm(branch)
        branch = branch if self.scale == 1 else branch * self.scale
        joined: Tensor = stream + branch if self.residual is None else self.residual(stream, branch)
        return joined


class _ScaledAdd(nn.Module):
    """`beta * stream + branch / alpha` with learned alpha and beta; beta starts at 1."""

    def __init__(self, branch_gain: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(1 / branch_gain))
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, stream: Tensor, branch: Tensor) -> Tensor:
        return self.beta * stream + branch / self.alpha


class _Square(nn.Module):
    """x * x + shift."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, source: Tensor) -> Tensor:
        return source.square() + self.shift


class _LeakyRelu(nn.Module):
    """x where it is positive, slope * x elsewhere, with one learned slope."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((1,), LEAKY_SLOPE_INIT))

    def forward(self, source: Tensor) -> Tensor:
        return functional.prelu(source, self.slope)


GELUS: dict[GeluForm, Callable[[], nn.Module]] = {
    "tanh": partial(nn.GELU, approximate="tanh"),
    "exact": nn.GELU,
    "piecewise": PiecewiseGelu,
}
MODULES: dict[type[Op], Callable[[Any], nn.Module]] = {  # modules of the ops of activations
    ops.Gelu: lambda op: GELUS[op.form](),
    ops.Relu: lambda op: nn.ReLU(),
    ops.LeakyRelu: lambda op: _LeakyRelu(),
    ops.Silu: lambda op: nn.SiLU(),
    ops.Square: lambda op: _Square(op.shift),
}


def build(
    architecture: Architecture,
    generator: torch.Generator,
    *,
    temperature_init: float = 1.0,
    slopes: SlopeSharing = "layer",
) -> Decoder:
    """Return a decoder with seeded weights: N(0, s) for linears, 0 for biases, 1 for gains.

    s is GPT-2's 0.02 at width 768 and proportional to 1 / sqrt(width), so that signals are as strong in a narrow proxy
    as in the model it stands for; linears that write to the residual stream have s / sqrt(2 x layers). The standard
    deviation of embedding tables is proportional to 1 / width: at width 96, layers with nonlinearities then train
    faster and linear ones slower, which brings their order nearer to the papers' (see the proxy scale in
    `nas.recipe.recipe`). In a shaped block, queries start at 0, layer 0's values at the identity plus N(0, s), and the
    last linear of an FFN without a learned scale at 0.1 times N(0, s).

    slopes: with `global`, all leaky ReLUs share one learned slope.

    Raises UserError for a shaped block with ReLU instead of softmax, which has no gradient at queries of 0.
    """
    forms = {softmax_form(architecture, layer) for layer in architecture.layers}
    if architecture.block_facts.is_shaped and "relu" in forms:
        raise UserError(
            f"block {architecture.block!r} starts from queries of 0, where softmax 'relu' has no gradient; choose "
            "softmax 'exact' or '2quad'."
        )
    model = Decoder(architecture, temperature_init=temperature_init)
    std = INIT_STD * math.sqrt(INIT_WIDTH / architecture.d_model)
    draw = partial(nn.init.normal_, generator=generator)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            draw(module.weight, std=min(INIT_STD * INIT_WIDTH / architecture.d_model, MAX_TABLE_STD))
        elif isinstance(module, nn.Linear) and name != "logits":
            writes_to_stream = name.endswith((".out", ".down", ".fused"))
            draw(module.weight, std=std / math.sqrt(2 * architecture.num_layers) if writes_to_stream else std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for layer, made in zip(architecture.layers, model.layers, strict=True):
        assert isinstance(made, Block)
        if (scale := query_scale(softmax_form(architecture, layer))) != 1 and made.attention is not None:
            made.scale_queries(torch.full((num_heads(architecture, layer),), scale))
    if not architecture.tied_embeddings:
        draw(model.logits.weight, std=std)
    if architecture.block_facts.is_shaped:
        _start_shaped(model)
    if slopes == "global":
        activations = [module for module in model.modules() if isinstance(module, _LeakyRelu)]
        for activation in activations:
            activation.slope = activations[0].slope
    return model


@torch.no_grad()
def _start_shaped(model: Decoder) -> None:
    """Let every layer pass the stream on, so that depth needs neither skips nor norms. Source: arXiv 2311.01906."""
    for module in model.modules():
        if isinstance(module, ShapedSelfAttention):
            queries, _ = module.qk.weight.chunk(2)
            queries.zero_()
            if isinstance(module.v, nn.Linear):
                module.v.weight += torch.eye(*module.v.weight.shape)
        elif isinstance(module, FeedForward):
            last = module.down if module.fused is None else module.fused
            last.weight *= math.sqrt(2 * model.architecture.num_layers)
            last.weight *= model.architecture.block_facts.branch_gain if module.residual is None else 1.0
