"""Attention of a decoder's layers; its modules are those of the op graph that `search_spaces.lower` makes."""

import math
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from costmodel.rotary import RotaryScaling, rotary_rates
from nas.model.mpc_friendly import attention_of, bound_of, last_rows
from nas.model.norms import inner_norm
from search_spaces.architecture import (
    Architecture,
    Layer,
    Positions,
    has_bias,
    num_heads,
    num_kv_heads,
    positions_of,
    rotary_dim,
    softmax_form,
)
from search_spaces.block import QUERIES_KEYS_VALUES
from search_spaces.inner import score_cap


class SelfAttention(nn.Module):
    """Causal softmax attention: one linear for queries, keys and values, or three, and an output linear.

    Each key and value head serves the same number of neighbouring query heads.
    """

    def __init__(self, architecture: Architecture, index: int, temperature_init: float) -> None:
        super().__init__()
        d_model, layer = architecture.d_model, architecture.layers[index]
        self.num_heads, self.head_dim = num_heads(architecture, layer), architecture.head_dim
        self.num_key_heads = num_kv_heads(architecture, layer)
        scale = 1.0 if architecture.folded else architecture.score_scale
        self.query_factor = 1.0 if scale is None else scale * math.sqrt(self.head_dim)  # `attend` divides by that root
        form = softmax_form(architecture, layer)
        self.bound = bound_of(self.num_heads, form)
        cap = score_cap(architecture, layer)
        self.attend = attention_of(form, self.bound, cap)
        self.attend_last = partial(last_rows, form=form, bound=self.bound, cap=cap)
        width, key_width = self.num_heads * self.head_dim, self.num_key_heads * self.head_dim
        self.widths = [width, key_width, key_width]
        if architecture.block_facts.packs_qkv:
            bias = has_bias(architecture, layer, "attention.qkv")
            self.qkv = nn.Linear(d_model, sum(self.widths), bias=bias)
        else:
            self.q, self.k, self.v = (
                nn.Linear(d_model, features, bias=has_bias(architecture, layer, name))
                for name, features in zip(QUERIES_KEYS_VALUES, self.widths, strict=True)
            )
        self.q_norm, self.k_norm = (inner_norm(architecture, layer, f"attention.{name}_norm") for name in "qk")
        positions = positions_of(architecture, index)
        self.rotary = _Rotary(architecture, positions) if positions.rotates else nn.Identity()
        self.temperature = _temperature(architecture, layer, temperature_init)
        self.out = nn.Linear(width, d_model, bias=has_bias(architecture, layer, "attention.out"))
        self.norm = inner_norm(architecture, layer, "attention.norm")

    def forward(self, source: Tensor, with_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        queries, keys, values = self.heads(source)
        temperature = None if self.temperature is None else self.temperature(source.shape[1])
        mixed, entropy = self.attend(queries, keys, values, temperature=temperature, with_entropy=with_entropy)
        made = self.out(mixed.transpose(1, 2).flatten(2))
        return made if self.norm is None else self.norm(made), entropy

    def step(self, source: Tensor, past: list[Tensor]) -> Tensor:
        """Return the attention of more tokens, batch x tokens x d_model, and add their keys and values to the past.

        past: keys and values of earlier tokens, each batch x heads x T x head_dim; empty before the first.
        """
        first = past[0].shape[-2] if past else 0
        queries, keys, values = self.heads(source, first)
        if past:
            keys, values = (torch.cat(pair, dim=-2) for pair in zip(past, (keys, values), strict=True))
        past[:] = [keys, values]
        temperature = None if self.temperature is None else self.temperature(first + source.shape[1])[:, first:]
        mixed = self.attend_last(queries, *past, temperature=temperature)
        made: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made if self.norm is None else self.norm(made)

    def heads(self, source: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values as attention takes them, each batch x heads x T x head_dim.

        first: the position of the first token.
        """
        batch, length, _ = source.shape
        linears = (self.q, self.k, self.v) if hasattr(self, "q") else ()
        parts = [linear(source) for linear in linears] or self.qkv(source).split(self.widths, dim=-1)
        parts = [_normed(self.q_norm, parts[0]), _normed(self.k_norm, parts[1]), parts[2]]
        queries, keys, values = (part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in parts)
        if isinstance(self.rotary, _Rotary):
            queries, keys = self.rotary(queries, first), self.rotary(keys, first)
        queries = queries if self.query_factor == 1 else queries * self.query_factor
        if (group := self.num_heads // self.num_key_heads) > 1:
            keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
        return queries, keys, values


def _normed(norm: nn.Module | None, source: Tensor) -> Tensor:
    """Normalise each group of as many features as an RMSNorm has."""
    if not isinstance(norm, nn.RMSNorm):
        return source if norm is None else norm(source)
    normed: Tensor = norm(source.view(*source.shape[:-1], -1, *norm.normalized_shape))
    return normed.flatten(-2)


class ShapedSelfAttention(nn.Module):
    """`a*I + b*softmax - c*C` per head; the values are the source itself, except in layer 0, which has a linear."""

    def __init__(self, architecture: Architecture, index: int, temperature_init: float) -> None:
        super().__init__()
        d_model = architecture.d_model
        self.num_heads, self.head_dim, self.folded = architecture.num_heads, architecture.head_dim, architecture.folded
        form = softmax_form(architecture, architecture.layers[index])
        self.bound = bound_of(self.num_heads, form)
        self.attend = attention_of(form, self.bound, architecture.score_cap)
        self.qk = nn.Linear(d_model, 2 * d_model, bias=architecture.bias)
        self.v = nn.Linear(d_model, d_model, bias=architecture.bias) if index == 0 else nn.Identity()
        self.temperature = _temperature(architecture, architecture.layers[index], temperature_init)
        self.shaped = _Shaped(architecture.num_heads)

    def forward(self, source: Tensor, with_entropy: bool = True) -> tuple[Tensor, Tensor | None]:
        batch, length, d_model = source.shape
        packed = self.qk(source).view(batch, length, 2, self.num_heads, self.head_dim)
        queries, keys = packed.permute(2, 0, 3, 1, 4)  # each batch x heads x T x head_dim
        if self.folded:  # whose weights include the 1 / sqrt(head_dim) of `attend`
            queries = queries * math.sqrt(self.head_dim)
        values = self.v(source).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        temperature = None if self.temperature is None else self.temperature(length)
        mixed, entropy = self.attend(queries, keys, values, temperature=temperature, with_entropy=with_entropy)
        return self.shaped(values, mixed).transpose(1, 2).reshape(batch, length, d_model), entropy


class _Shaped(nn.Module):
    """`a*V + b*(softmax V) - c*(C V)`, with C a running mean, which a softmax of zeros equals; factors start at 1."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.identity, self.softmax, self.uniform = (nn.Parameter(torch.ones(num_heads)) for _ in range(3))

    def forward(self, values: Tensor, mixed: Tensor) -> Tensor:
        """Combine values and the attention's output (`mixed`), each batch x heads x T x head_dim."""
        counts = torch.arange(1, values.shape[-2] + 1, device=values.device)
        running_mean = values.cumsum(dim=-2) / counts.unsqueeze(-1)
        a, b, c = (gain.view(-1, 1, 1) for gain in (self.identity, self.softmax, self.uniform))
        return a * values + b * mixed - c * running_mean


class _Temperature(nn.Module):
    """Temperatures t[h, i] > 0 that divide row i of head h of the scores; ln t is trained."""

    def __init__(self, num_heads: int, context: int, initial: float) -> None:
        super().__init__()
        self.log_weight = nn.Parameter(torch.full((num_heads, context), math.log(initial)))

    def forward(self, length: int) -> Tensor:
        """Return the temperatures, heads x length."""
        return self.log_weight[:, :length].exp()


class _Rotary(nn.Module):
    """Rotates the first features of every head by angles that grow with the position; halves are paired.

    Source: Su et al. 2021, arXiv 2104.09864, as GPT-NeoX and Pythia lay it out.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, architecture: Architecture, positions: Positions) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim(architecture)
        base = positions.base or architecture.rotary_base
        cosines, sines = rotary_tables(architecture.context, self.rotary_dim, base, positions.scaling)
        self.register_buffer("cosines", torch.from_numpy(cosines), persistent=False)
        self.register_buffer("sines", torch.from_numpy(sines), persistent=False)

    def forward(self, heads: Tensor, start: int = 0) -> Tensor:
        """Rotate heads, batch x heads x T x head_dim, whose first position is `start`."""
        seen = slice(start, start + heads.shape[-2])
        turned, kept = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
        first, second = turned.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
        return torch.cat((turned * self.cosines[seen] + crossed * self.sines[seen], kept), dim=-1)


@cache  # all layers of a model share them
def rotary_tables(
    context: int, rotary_dim: int, base: float, scaling: RotaryScaling | None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosines and sines of the angle of every position and rotated feature, each context x rotary_dim.

    They are numpy arrays, so that a model on `meta`, whose tensors have no data, puts none of them into the cache.
    """
    angles = np.arange(context)[:, None] * np.array(rotary_rates(rotary_dim, base, scaling))  # context x rotary_dim / 2
    cosines, sines = (np.tile(table(angles), 2).astype(np.float32) for table in (np.cos, np.sin))
    return cosines, sines


def _temperature(architecture: Architecture, layer: Layer, initial: float) -> _Temperature | None:
    if layer.attention != "softmax-temperature":
        return None
    return _Temperature(architecture.num_heads, architecture.context, initial)
