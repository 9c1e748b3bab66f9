"""The decoder a candidate trains: module for module the op graph that `search_spaces.lower` prices.

A module with weights carries the name of its node, so that `layers.3.attention.qkv.weight` in a state dict are the
weights of node `layers.3.attention.qkv`. Linear weights are out_features x in_features, as torch keeps them.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from costmodel.errors import UserError
from costmodel.ops import GeluForm
from nas.model.mpc_friendly import PiecewiseGelu, attention_of
from nas.recipe.recipe import SlopeSharing
from search_spaces.architecture import Architecture, Block, Layer, Norm
from search_spaces.lower import PYTHIA_ROTARY_SHARE

INIT_STD = 0.02  # Radford et al. 2019, GPT-2, at its smallest width
INIT_WIDTH = 768
MAX_TABLE_STD = 0.16  # the rule at width 96; below it a table of unit variance would predict its own tokens
LEAKY_SLOPE_INIT = 1e-2  # arXiv 2501.03489, leaky ReLU study
ROTARY_BASE = 10_000  # Su et al. 2021, arXiv 2104.09864, and Pythia's configs
SAS_BRANCH_GAIN = 0.1  # He and Hofmann 2024, published configuration `skipless`: gain of the FFN at the start


class Prediction(NamedTuple):
    """logits: batch x T x vocab. entropies: layers x batch x heads x T, in nats, one per attention row, if wanted."""

    logits: Tensor
    entropies: Tensor | None


class Decoder(nn.Module):
    """A decoder-only language model. Raises UserError if a `pythia` block would rotate an odd number of features."""

    def __init__(self, architecture: Architecture, *, temperature_init: float = 1.0) -> None:
        super().__init__()
        d_model, vocab_size = architecture.d_model, architecture.vocab_size
        self.architecture = architecture
        self.embed = nn.Embedding(vocab_size, d_model)
        self.position = nn.Embedding(architecture.context, d_model) if architecture.block != "pythia" else None
        block = BLOCKS[architecture.block]
        self.layers = nn.ModuleList(
            block(architecture, index, temperature_init) for index in range(architecture.num_layers)
        )
        self.final_norm = _norm(architecture.final_norm, d_model)
        self.logits = nn.Linear(d_model, vocab_size, bias=False)
        if architecture.tied_embeddings:
            self.logits.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, with_entropies: bool = True) -> Prediction:
        """tokens: batch x T. Without entropies attention is faster.

        Raises UserError if T is above the architecture's context.
        """
        stream, entropies = self.features(tokens, with_entropies=with_entropies)
        return Prediction(self.logits(stream), entropies)

    def features(self, tokens: Tensor, *, with_entropies: bool) -> tuple[Tensor, Tensor | None]:
        """What the logits are a projection of, batch x T x d_model, and the entropies; else as `forward`."""
        if tokens.shape[1] > self.architecture.context:
            raise UserError(
                f"a sequence must not be longer than the model's context, but got {tokens.shape[1]} tokens, "
                f"context={self.architecture.context}."
            )
        stream = self.embed(tokens)  # batch x T x d_model
        if self.position is not None:
            stream = stream + self.position.weight[: tokens.shape[1]]
        entropies = []
        for layer in self.layers:
            stream, entropy = layer(stream, with_entropies)
            entropies.append(entropy)  # batch x heads x T
        return self.final_norm(stream), torch.stack(entropies) if with_entropies else None


class _GptBlock(nn.Module):
    """A = X + MHA(Norm1(X)); Y = A + FFN(Norm2(A))."""

    def __init__(self, architecture: Architecture, index: int, temperature_init: float) -> None:
        super().__init__()
        layer = architecture.layers[index]
        reads_values = architecture.block == "sas" and index > 0  # no linear there takes up a gain
        self.norm1 = _norm(layer.norm1, architecture.d_model, affine=not architecture.folded or reads_values)
        attention = _ShapedSelfAttention if architecture.block == "sas" else _SelfAttention
        self.attention: nn.Module = attention(architecture, index, temperature_init)
        self.norm2 = _norm(layer.norm2, architecture.d_model, affine=not architecture.folded)
        self.ffn = None if layer.ffn == "none" else _Ffn(architecture, layer)

    def forward(self, stream: Tensor, with_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        attended, entropy = self.attention(self.norm1(stream), with_entropy)
        stream = stream + attended
        if self.ffn is not None:
            stream = self.ffn(self.norm2(stream), stream)
        return stream, entropy


class _PythiaBlock(_GptBlock):
    """Y = X + MHA(Norm1(X)) + FFN(Norm2(X)): attention and FFN read the same stream."""

    def forward(self, stream: Tensor, with_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        attended, entropy = self.attention(self.norm1(stream), with_entropy)
        joined = stream + attended
        if self.ffn is not None:
            joined = self.ffn(self.norm2(stream), joined)
        return joined, entropy


class _SasBlock(_GptBlock):
    """A = shaped MHA(Norm1(X)), without a skip; Y = A + FFN(Norm2(A)).

    Source: He and Hofmann 2024, "Simplifying Transformer Blocks", arXiv 2311.01906, section 4.
    """

    def forward(self, stream: Tensor, with_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        attended, entropy = self.attention(self.norm1(stream), with_entropy)
        if self.ffn is not None:
            attended = self.ffn(self.norm2(attended), attended)
        return attended, entropy


BLOCKS: dict[Block, type[_GptBlock]] = {"gpt2": _GptBlock, "pythia": _PythiaBlock, "sas": _SasBlock}


class _SelfAttention(nn.Module):
    """Packed query, key and value linear, causal softmax per head, output linear."""

    def __init__(self, architecture: Architecture, index: int, temperature_init: float) -> None:
        super().__init__()
        d_model = architecture.d_model
        self.num_heads, self.head_dim, self.folded = architecture.num_heads, architecture.head_dim, architecture.folded
        self.attend = attention_of(architecture.softmax)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=architecture.bias)
        self.rotary = _Rotary(architecture) if architecture.block == "pythia" else nn.Identity()
        self.temperature = _temperature(architecture, architecture.layers[index], temperature_init)
        self.out = nn.Linear(d_model, d_model, bias=architecture.bias)

    def forward(self, source: Tensor, with_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        batch, length, d_model = source.shape
        packed = self.qkv(source).view(batch, length, 3, self.num_heads, self.head_dim)
        queries, keys, values = packed.permute(2, 0, 3, 1, 4)  # each batch x heads x T x head_dim
        queries, keys = self.rotary(queries), self.rotary(keys)
        queries = _rescaled(queries) if self.folded else queries
        temperature = None if self.temperature is None else self.temperature(length)
        mixed, entropy = self.attend(queries, keys, values, temperature=temperature, with_entropy=with_entropy)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, d_model)), entropy


class _ShapedSelfAttention(nn.Module):
    """`a*I + b*softmax - c*C` per head on values that are the source itself, but for layer 0, which has a linear."""

    def __init__(self, architecture: Architecture, index: int, temperature_init: float) -> None:
        super().__init__()
        d_model = architecture.d_model
        self.num_heads, self.head_dim, self.folded = architecture.num_heads, architecture.head_dim, architecture.folded
        self.attend = attention_of(architecture.softmax)
        self.qk = nn.Linear(d_model, 2 * d_model, bias=architecture.bias)
        self.v = nn.Linear(d_model, d_model, bias=architecture.bias) if index == 0 else nn.Identity()
        self.temperature = _temperature(architecture, architecture.layers[index], temperature_init)
        self.shaped = _Shaped(architecture.num_heads)

    def forward(self, source: Tensor, with_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        batch, length, d_model = source.shape
        packed = self.qk(source).view(batch, length, 2, self.num_heads, self.head_dim)
        queries, keys = packed.permute(2, 0, 3, 1, 4)  # each batch x heads x T x head_dim
        queries = _rescaled(queries) if self.folded else queries
        values = self.v(source).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        temperature = None if self.temperature is None else self.temperature(length)
        mixed, entropy = self.attend(queries, keys, values, temperature=temperature, with_entropy=with_entropy)
        return self.shaped(values, mixed).transpose(1, 2).reshape(batch, length, d_model), entropy


class _Shaped(nn.Module):
    """`a*V + b*(softmax V) - c*(C V)` with C the uniform causal attention: a running mean. All start at 1.

    With queries of 0 the softmax is C, so that a fresh layer passes its values on.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.identity = nn.Parameter(torch.ones(num_heads))
        self.softmax = nn.Parameter(torch.ones(num_heads))
        self.uniform = nn.Parameter(torch.ones(num_heads))

    def forward(self, values: Tensor, mixed: Tensor) -> Tensor:
        """values, mixed: batch x heads x T x head_dim."""
        counts = torch.arange(1, values.shape[-2] + 1, device=values.device)
        running_mean = values.cumsum(dim=-2) / counts.unsqueeze(-1)
        a, b, c = (gain.view(-1, 1, 1) for gain in (self.identity, self.softmax, self.uniform))
        return a * values + b * mixed - c * running_mean


class _Temperature(nn.Module):
    """Row i of head h of the scores is divided by t[h, i] > 0; ln t is what is trained."""

    def __init__(self, num_heads: int, context: int, initial: float) -> None:
        super().__init__()
        self.log_weight = nn.Parameter(torch.full((num_heads, context), math.log(initial)))

    def forward(self, length: int) -> Tensor:
        """heads x length."""
        return self.log_weight[:, :length].exp()


class _Rotary(nn.Module):
    """Rotates the first features of every head by angles that grow with the position; halves are paired.

    Source: Su et al. 2021, arXiv 2104.09864, as GPT-NeoX and Pythia lay it out.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.rotary_dim = max(2, architecture.head_dim // PYTHIA_ROTARY_SHARE)
        if self.rotary_dim % 2 or self.rotary_dim > architecture.head_dim:
            raise UserError(
                f"block 'pythia' rotates a quarter of a head's features (2 at least), which must be even, "
                f"but got head_dim={architecture.head_dim}."
            )
        cosines, sines = rotary_tables(architecture.context, self.rotary_dim)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        """heads: batch x heads x T x head_dim."""
        length = heads.shape[-2]
        turned, kept = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
        first, second = turned.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
        return torch.cat((turned * self.cosines[:length] + crossed * self.sines[:length], kept), dim=-1)


def rotary_tables(context: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angle of every position and rotated feature, each context x rotary_dim."""
    rates = ROTARY_BASE ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(context, dtype=torch.float64)[:, None] * rates  # context x rotary_dim / 2
    return angles.cos().repeat(1, 2).float(), angles.sin().repeat(1, 2).float()


class _Ffn(nn.Module):
    """Two linears around an activation, or one fused linear, and how the result joins the residual stream."""

    def __init__(self, architecture: Architecture, layer: Layer) -> None:
        super().__init__()
        d_model, d_ff, bias = architecture.d_model, architecture.d_ff, architecture.bias
        self.fused = nn.Linear(d_model, d_model, bias=bias) if layer.ffn == "fused" else None
        if self.fused is None:
            self.up = nn.Linear(d_model, d_ff, bias=bias)
            self.activation = ACTIVATIONS[layer.ffn](architecture)
            self.down = nn.Linear(d_ff, d_model, bias=bias)
        branch_gain = SAS_BRANCH_GAIN if architecture.block == "sas" else 1.0
        self.residual = _ScaledAdd(branch_gain) if layer.stabiliser == "scaled" else None

    def forward(self, source: Tensor, stream: Tensor) -> Tensor:
        """source: what the branch reads; stream: what its result is added to; both batch x T x d_model."""
        branch: Tensor = self.down(self.activation(self.up(source))) if self.fused is None else self.fused(source)
        joined: Tensor = stream + branch if self.residual is None else self.residual(stream, branch)
        return joined


class _ScaledAdd(nn.Module):
    """`beta * stream + branch / alpha`, one learned pair; beta starts at 1."""

    def __init__(self, branch_gain: float) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(1 / branch_gain))
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, stream: Tensor, branch: Tensor) -> Tensor:
        return self.beta * stream + branch / self.alpha


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
ACTIVATIONS: dict[str, Callable[[Architecture], nn.Module]] = {
    "gelu": lambda architecture: GELUS[architecture.gelu](),
    "relu": lambda _: nn.ReLU(),
    "leaky-relu": lambda _: _LeakyRelu(),
    "identity": lambda _: nn.Identity(),
}


def build(
    architecture: Architecture,
    generator: torch.Generator,
    *,
    temperature_init: float = 1.0,
    slopes: SlopeSharing = "layer",
) -> Decoder:
    """A decoder with seeded weights: N(0, s) for linears, 0 for biases, 1 for gains.

    s is GPT-2's 0.02 at width 768 and grows as 1 / sqrt(width) below, so that a narrow proxy passes signals on as
    strongly as the model it stands for; linears that write to the residual stream have s / sqrt(2 x layers). Tables of
    tokens and positions grow as 1 / width: at width 96 rows with nonlinearities then train faster and linear ones
    slower, which brings their order nearer to the papers' (see the proxy scale in `nas.recipe.recipe`). Block
    `sas` has none of those; its queries start at 0, layer 0's values at the identity plus N(0, s), and an FFN whose
    result is not scaled by a learned gain at 0.1 times N(0, s).

    slopes: `global` has all leaky ReLUs share one learned slope.

    Raises UserError for block `sas` with a ReLU in place of softmax, which has no gradient at queries of 0.
    """
    if architecture.block == "sas" and architecture.softmax == "relu":
        raise UserError(
            "block 'sas' starts from queries of 0, where softmax 'relu' has no gradient; choose softmax 'exact' or "
            "'2quad'."
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
    if not architecture.tied_embeddings:
        draw(model.logits.weight, std=std)
    if architecture.block == "sas":
        _start_simplified(model)
    if slopes == "global":
        _share_slopes(model)
    return model


@torch.no_grad()
def _start_simplified(model: Decoder) -> None:
    """Every layer passes the stream on, so that depth needs neither skips nor norms. Source: arXiv 2311.01906."""
    for module in model.modules():
        if isinstance(module, _ShapedSelfAttention):
            queries, _ = module.qk.weight.chunk(2)
            queries.zero_()
            if isinstance(module.v, nn.Linear):
                module.v.weight += torch.eye(*module.v.weight.shape)
        elif isinstance(module, _Ffn):
            last = module.down if module.fused is None else module.fused
            last.weight *= math.sqrt(2 * model.architecture.num_layers)
            last.weight *= SAS_BRANCH_GAIN if module.residual is None else 1.0


def _share_slopes(model: Decoder) -> None:
    activations = [module for module in model.modules() if isinstance(module, _LeakyRelu)]
    for activation in activations:
        activation.slope = activations[0].slope


def _rescaled(queries: Tensor) -> Tensor:
    """Against the 1/sqrt(head_dim) of `causal_attention`, which a folded model has in its weights."""
    return queries * math.sqrt(queries.shape[-1])


def _temperature(architecture: Architecture, layer: Layer, initial: float) -> _Temperature | None:
    if layer.attention == "softmax":
        return None
    return _Temperature(architecture.num_heads, architecture.context, initial)


def _norm(kind: Norm, features: int, *, affine: bool = True) -> nn.Module:
    return nn.LayerNorm(features, elementwise_affine=affine) if kind == "layernorm" else nn.Identity()
