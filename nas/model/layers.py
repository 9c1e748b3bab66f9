"""The layers of a decoder and the decoder itself; `nas.model.decoder` adds what only training needs.

Modules with weights have the names of the nodes of the op graph that `search_spaces.lower` makes:
`layers.3.attention.qkv.weight` in a state dict is the weight of node `layers.3.attention.qkv`. Exported models include
this code. `nas.model.settings` makes the arguments.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from costmodel.errors import UserError
from nas.attention.reference import capped
from nas.model.mpc_friendly import PiecewiseGelu
from nas.model.self_attention import EXPORTED, Parts, SelfAttention, ShapedSelfAttention, norm_of

LEAKY_SLOPE_INIT = 1e-2  # arXiv 2501.03489, leaky ReLU study


class PlainDecoder(nn.Module):
    """A decoder-only language model, without the parts that only training needs."""

    def __init__(
        self,
        *,
        vocab_size: int,
        d_model: int,
        context: int,
        has_windows: bool,
        has_table: bool,
        layers: Sequence[dict[str, Any]],
        final_norm: dict[str, Any] | None,
        is_tied: bool,
        embedding_scale: float,
        logit_scale: float,
        logit_cap: float | None,
        parts: Parts = EXPORTED,
    ) -> None:
        super().__init__()
        self.context, self.has_windows = context, has_windows
        self.embedding_scale, self.logit_scale, self.logit_cap = embedding_scale, logit_scale, logit_cap
        self.embed = nn.Embedding(vocab_size, d_model)
        self.position = nn.Embedding(context, d_model) if has_table else None
        self.layers = nn.ModuleList(Block(**layer, parts=parts) for layer in layers)
        self.final_norm = norm_of(final_norm, parts)
        self.logits = nn.Linear(d_model, vocab_size, bias=False)
        if is_tied:
            self.logits.weight = self.embed.weight

    def logits_of(self, features: Tensor) -> Tensor:
        """Return the logits, batch x T x vocab, of the input of the vocabulary projection."""
        return capped(self.logits(features), self.logit_cap)

    def read_out(self, stream: Tensor) -> Tensor:
        """Return the input of the vocabulary projection. stream: the output of the last layer."""
        normed: Tensor = self.final_norm(stream)
        return normed if self.logit_scale == 1 else normed * self.logit_scale

    def continued(self, tokens: Tensor, past: Any | None) -> Tensor:
        """Return the vocabulary projection's input for more tokens of each sequence, batch x T x d_model.

        tokens: batch x T. past: keys and values of earlier tokens, a `Past` or a cache of transformers, to which those
            of `tokens` are added; None if there are no earlier tokens and nothing is to be cached.

        Raises UserError if a sequence exceeds the context.
        """
        first = 0 if past is None else int(past.get_seq_length())
        stream = self.embedded(tokens, first)
        if past is not None and all(layer.attention is None for layer in self.layers):  # only positions are counted
            past.update(*(stream.new_zeros(len(tokens), 1, tokens.shape[1], 1) for _ in range(2)), 0)
        for layer in self.layers:
            stream, _ = layer(stream, False, past, first)
        return self.read_out(stream)

    def embedded(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Return the input of the first layer, batch x T x d_model. first: the position of the first token.

        Raises UserError if a sequence exceeds the context.
        """
        if first + tokens.shape[1] > self.context:
            why = " (beyond it attention has windows)" if self.has_windows else ""
            raise UserError(
                f"a sequence must not be longer than the model's context, but got {first + tokens.shape[1]} tokens, "
                f"context={self.context}{why}."
            )
        stream: Tensor = self.embed(tokens)
        stream = stream if self.embedding_scale == 1 else stream * self.embedding_scale
        return stream if self.position is None else stream + self.position.weight[first : first + tokens.shape[1]]


class Block(nn.Module):
    """Attention and FFN of one layer, joined as `search_spaces.block` says; a missing part adds nothing."""

    def __init__(
        self,
        *,
        join: str,
        queries: str,
        scale: float,
        norm1: dict[str, Any] | None,
        attention: dict[str, Any] | None,
        norm2: dict[str, Any] | None,
        ffn: dict[str, Any] | None,
        parts: Parts,
    ) -> None:
        super().__init__()
        self.join, self.queries, self.scale = join, queries, scale
        self.norm1 = norm_of(norm1, parts)
        kind = ShapedSelfAttention if join == "shaped" else SelfAttention
        self.attention = None if attention is None else kind(**attention, parts=parts)
        self.norm2 = norm_of(norm2, parts)
        self.ffn = None if ffn is None else FeedForward(**ffn, scale=scale, parts=parts)
        self.gates: dict[str, float | Tensor] = {}  # factors of `attention` and `ffn` while they are gradually removed

    def forward(
        self, stream: Tensor, with_entropy: bool = True, past: Any | None = None, first: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Return the stream after the layer, batch x T x d_model, and the entropies of attention, batch x heads x T.

        Entropies are as in `SelfAttention.forward`; without attention there are 0 heads. stream: batch x T x d_model.
        past: keys and values of the positions before `first`, the position of the first token; None to cache nothing.
        """
        if self.attention is None:
            joined, entropy = stream, stream.new_zeros(len(stream), 0, stream.shape[1]) if with_entropy else None
        else:
            attended, entropy = self.attention(self.norm1(stream), with_entropy, past, first)
            attended = self.gates["attention"] * attended if "attention" in self.gates else attended
            attended = attended if self.scale == 1 else attended * self.scale
            joined = attended if self.join == "shaped" else stream + attended
        if self.ffn is not None:
            made = self.ffn(self.norm2(stream if self.join == "parallel" else joined), joined)
            joined = joined.lerp(made, self.gates["ffn"]) if "ffn" in self.gates else made
        return joined, entropy

    @torch.no_grad()
    def scale_queries(self, factors: Tensor) -> Tensor:
        """Multiply the queries of each head by a factor. factors: one per head.

        If the heads share the gain of a norm, all get the geometric mean. Returns the factors that were used.
        """
        assert self.attention is not None
        scaled, head_dim = self.get_submodule(self.queries), self.attention.head_dim
        if isinstance(scaled, nn.RMSNorm) and scaled.weight.numel() < len(factors) * head_dim:
            factors = factors.log().mean().exp().expand_as(factors)
            scaled.weight.mul_(factors[0])
            return factors
        for value in scaled.parameters():
            rows = value[: len(factors) * head_dim]
            rows.mul_(factors.repeat_interleave(head_dim).view(-1, *[1] * (value.dim() - 1)))
        return factors


class FeedForward(nn.Module):
    """An FFN that is added to the stream: two linears around an activation, maybe with a gate, or one fused linear.

    activations: pairs of a name in `ACTIVATIONS` and arguments, applied in order. norm, scale: norm and constant factor
        of the FFN's output. branch_gain: its initial factor in a learned scaled sum; None for a plain sum.
    """

    def __init__(
        self,
        *,
        d_model: int,
        d_ff: int,
        is_fused: bool,
        is_gated: bool,
        biases: dict[str, bool],
        activations: Sequence[tuple[str, dict[str, Any]]],
        scale: float,
        norm: dict[str, Any] | None,
        branch_gain: float | None,
        parts: Parts,
    ) -> None:
        super().__init__()
        self.fused = nn.Linear(d_model, d_model, bias=biases["fused"]) if is_fused else None
        self.gate = nn.Linear(d_model, d_ff, bias=biases["gate"]) if is_gated else None
        if self.fused is None:
            self.up = nn.Linear(d_model, d_ff, bias=biases["up"])
            made = [ACTIVATIONS[name](**arguments) for name, arguments in activations]
            self.activation = made[0] if len(made) == 1 else nn.Sequential(*made)
            self.down = nn.Linear(d_ff, d_model, bias=biases["down"])
        self.scale = scale
        self.norm = None if norm is None else norm_of(norm, parts)
        self.residual = None if branch_gain is None else _ScaledAdd(branch_gain)

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
    """`beta * stream + branch / alpha` with learned alpha and beta, which start at 1 / branch_gain and 1."""

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


class LeakyRelu(nn.Module):
    """x where it is positive, slope * x elsewhere, with one learned slope."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((1,), LEAKY_SLOPE_INIT))

    def forward(self, source: Tensor) -> Tensor:
        return functional.prelu(source, self.slope)


GELUS: dict[str, Callable[[], nn.Module]] = {
    "tanh": partial(nn.GELU, approximate="tanh"),
    "exact": nn.GELU,
    "piecewise": PiecewiseGelu,
}
ACTIVATIONS: dict[str, Callable[..., nn.Module]] = {  # class name of the activation's op -> module
    "Gelu": lambda form: GELUS[form](),
    "Relu": nn.ReLU,
    "LeakyRelu": LeakyRelu,
    "Silu": nn.SiLU,
    "Square": _Square,
}
