"""Attention of a decoder's layers; modules have the names of the op graph's nodes (`search_spaces.lower`).

Exported models include this code. `nas.model.settings` makes the arguments of modules.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from costmodel.ops.rotary import RotaryScaling, rotary_rates
from nas.attention.reference import Attended, attention_reference, exact_attention
from nas.model.mpc_friendly import FORMS, ScoreBound, last_rows, normalised_attention

Attention = Callable[..., Attended]  # as `exact_attention`


class Temperature(nn.Module):
    """Temperatures t[h, i] > 0 that divide row i of head h of the scores."""

    def __init__(self, num_heads: int, context: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads, context))

    def forward(self, first: int, last: int) -> Tensor:
        """Return the temperatures of positions `first` to `last` - 1, heads x positions."""
        return self.weight[:, first:last]


class FixedNorm(nn.Module):
    """A frozen norm after folding its deviation into its gain: `weight * (x - mean(x)) + bias`, or `weight * x`.

    centred: whether to subtract the mean and add a bias. epsilon, groups: arguments of `FrozenNorm`, not used here.
    """

    def __init__(self, features: int, epsilon: float, *, centred: bool, groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features)) if centred else None

    def forward(self, source: Tensor) -> Tensor:
        if self.bias is None:
            return source * self.weight
        return torch.addcmul(self.bias, source - source.mean(dim=-1, keepdim=True), self.weight)


class Parts(NamedTuple):
    """The parts that differ between training and exports: attention functions, frozen norms and temperatures.

    attend: exact attention. attend_by: attention by a form in `FORMS`.
    """

    attend: Attention = exact_attention
    attend_by: Attention = normalised_attention
    frozen_norm: Callable[..., nn.Module] = FixedNorm
    temperature: Callable[[int, int], nn.Module] = Temperature


EXPORTED = Parts()


def norm_of(settings: dict[str, Any] | None, parts: Parts) -> nn.Module:
    """Return the norm for a result of `nas.model.settings.norm_settings`, or the identity for None."""
    if settings is None:
        return nn.Identity()
    features, epsilon, centred = settings["features"], settings["epsilon"], settings["centred"]
    if settings["frozen"]:
        return parts.frozen_norm(features, epsilon, centred=centred, groups=settings["groups"])
    return (nn.LayerNorm if centred else nn.RMSNorm)(features, epsilon, elementwise_affine=settings["affine"])


class Past:
    """A cache of the keys and values of earlier positions, with methods as in caches of transformers.

    kept: keys and values by the number of their layer, counted from 0 among layers with attention; None for none yet.
    """

    def __init__(self, kept: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        self.kept = {} if kept is None else kept  # each batch x heads x T x head_dim

    def get_seq_length(self) -> int:
        """Return the number of earlier positions."""
        return self.kept[0][0].shape[-2] if self.kept else 0

    def update(self, keys: Tensor, values: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """Append keys and values, batch x heads x T x head_dim, of layer `place` (as in `kept`); return all so far."""
        if place in self.kept:
            before = self.kept[place]
            keys, values = torch.cat((before[0], keys), dim=-2), torch.cat((before[1], values), dim=-2)
        self.kept[place] = keys, values
        return keys, values

    def of_rows(self, rows: Tensor) -> "Past":
        """Return a copy for some sequences of the batch. rows: their indices in it."""
        return Past({place: (keys[rows], values[rows]) for place, (keys, values) in self.kept.items()})


class _Attention(nn.Module):
    """Causal attention with a form of softmax."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_key_heads: int,
        head_dim: int,
        form: str,
        has_bound: bool,
        cap: float | None,
        query_factor: float,
        place: int,
        parts: Parts,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads, self.head_dim = num_heads, num_key_heads, head_dim
        self.query_factor, self.place, self.form, self.cap = query_factor, place, form, cap
        self.bound = ScoreBound(num_heads, form) if has_bound else None
        self.attend_last = partial(last_rows, form=form, bound=self.bound, cap=cap)
        if form in FORMS:
            self.attend: Attention = partial(parts.attend_by, form=form, bound=self.bound, cap=cap)
        else:
            self.attend = parts.attend if cap is None else partial(attention_reference, cap=cap)
        self.temperature: nn.Module | None = None

    def mixed(
        self, queries: Tensor, keys: Tensor, values: Tensor, first: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of positions from `first` on, batch x heads x T x head_dim, and entropies if first is 0."""
        queries = queries if self.query_factor == 1 else queries * self.query_factor
        if (group := self.num_heads // self.num_key_heads) > 1:
            keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
        temperature = None if self.temperature is None else self.temperature(first, first + queries.shape[-2])
        if first:
            return self.attend_last(queries, keys, values, temperature=temperature), None
        return self.attend(queries, keys, values, temperature=temperature, with_entropy=with_entropy)


class SelfAttention(_Attention):
    """Causal attention by softmax or a form in `FORMS`; queries, keys and values come from one linear or from three.

    Each key and value head serves the same number of neighbouring query heads.
    """

    def __init__(
        self,
        *,
        d_model: int,
        packs_qkv: bool,
        biases: dict[str, bool],
        norms: dict[str, dict[str, Any] | None],
        rotary: dict[str, Any] | None,
        temperatures: int | None,
        parts: Parts,
        **heads: Any,
    ) -> None:
        super().__init__(**heads, parts=parts)
        width, key_width = self.num_heads * self.head_dim, self.num_key_heads * self.head_dim
        self.widths = [width, key_width, key_width]
        if packs_qkv:
            self.qkv = nn.Linear(d_model, sum(self.widths), bias=biases["qkv"])
        else:
            self.q, self.k, self.v = (
                nn.Linear(d_model, features, bias=biases[name])
                for name, features in zip("qkv", self.widths, strict=True)
            )
        made = {name: None if norm is None else norm_of(norm, parts) for name, norm in norms.items()}
        self.q_norm, self.k_norm = made["q_norm"], made["k_norm"]
        self.rotary = nn.Identity() if rotary is None else Rotary(**rotary)
        self.temperature = parts.temperature(self.num_heads, temperatures) if temperatures else None
        self.out = nn.Linear(width, d_model, bias=biases["out"])
        self.norm = made["norm"]

    def forward(
        self, source: Tensor, with_entropy: bool = True, past: Any | None = None, first: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, batch x T x d_model, and the row entropies in nats, batch x heads x T.

        Entropies are None if `first` > 0, and may be None if they are not wanted. source: batch x T x d_model.
        past: as in `PlainDecoder.continued`. first: position of the first token.
        """
        batch, length, _ = source.shape
        linears = (self.q, self.k, self.v) if hasattr(self, "q") else ()
        made = [linear(source) for linear in linears] or self.qkv(source).split(self.widths, dim=-1)
        made = [_normed(self.q_norm, made[0]), _normed(self.k_norm, made[1]), made[2]]
        queries, keys, values = (part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in made)
        if isinstance(self.rotary, Rotary):
            queries, keys = self.rotary(queries, first), self.rotary(keys, first)
        keys, values = (keys, values) if past is None else past.update(keys, values, self.place)
        mixed, entropy = self.mixed(queries, keys, values, first, with_entropy)
        mixed = mixed.to(made[2].dtype)  # caches of transformers may widen the values
        attended = self.out(mixed.transpose(1, 2).flatten(2))
        return attended if self.norm is None else self.norm(attended), entropy


def _normed(norm: nn.Module | None, source: Tensor) -> Tensor:
    """Apply a norm of queries or keys, if there is one; an RMSNorm to every group of as many features as it has."""
    if not isinstance(norm, nn.RMSNorm):
        return source if norm is None else norm(source)
    normed: Tensor = norm(source.view(*source.shape[:-1], -1, *norm.normalized_shape))
    return normed.flatten(-2)


class ShapedSelfAttention(_Attention):
    """Attention by `a*I + b*softmax - c*C`, where a, b, c are learned per head and C averages all visible positions.

    Values are the source itself or, with `projects` (in layer 0), a linear of the source.
    """

    def __init__(
        self, *, d_model: int, bias: bool, projects: bool, temperatures: int | None, parts: Parts, **heads: Any
    ) -> None:
        super().__init__(**heads, parts=parts)
        self.qk = nn.Linear(d_model, 2 * d_model, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias) if projects else nn.Identity()
        self.temperature = parts.temperature(self.num_heads, temperatures) if temperatures else None
        self.shaped = _Shaped(self.num_heads)

    def forward(
        self, source: Tensor, with_entropy: bool = True, past: Any | None = None, first: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and entropies. Arguments and results are those of `SelfAttention.forward`."""
        batch, length, d_model = source.shape
        packed = self.qk(source).view(batch, length, 2, self.num_heads, self.head_dim)
        queries, keys = packed.permute(2, 0, 3, 1, 4)  # each batch x heads x T x head_dim
        values = self.v(source).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        keys, values = (keys, values) if past is None else past.update(keys, values, self.place)
        mixed, entropy = self.mixed(queries, keys, values, first, with_entropy)
        return self.shaped(values, mixed, first).transpose(1, 2).reshape(batch, length, d_model), entropy


class _Shaped(nn.Module):
    """`a*V + b*(softmax V) - c*(C V)`; C V is the running mean of V, as by a softmax of zeros. a, b, c start at 1."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.identity, self.softmax, self.uniform = (nn.Parameter(torch.ones(num_heads)) for _ in range(3))

    def forward(self, values: Tensor, mixed: Tensor, first: int) -> Tensor:
        """Return the weighted sum for the positions from `first` on, batch x heads x T x head_dim.

        values: of all positions. mixed: the output of softmax attention, of the positions from `first` on.
        """
        counts = torch.arange(1, values.shape[-2] + 1, device=values.device)
        running_mean = values.cumsum(dim=-2) / counts.unsqueeze(-1)
        if first:
            values, running_mean = values[..., first:, :], running_mean[..., first:, :]
        a, b, c = (gain.view(-1, 1, 1) for gain in (self.identity, self.softmax, self.uniform))
        return a * values + b * mixed - c * running_mean


class Rotary(nn.Module):
    """Rotates the first `width` features of every head: features f and f + width / 2 turn together, as in GPT-NeoX.

    The angle is the position times `rotary_rates(width, base, scaling)[f]`. context: largest number of positions.

    Source: Su et al. 2021, arXiv 2104.09864.
    """

    cosines: Tensor
    sines: Tensor

    def __init__(self, *, context: int, width: int, base: float, scaling: dict[str, Any] | None) -> None:
        super().__init__()
        self.rotary_dim = width
        self.table = context, width, base, None if scaling is None else RotaryScaling(**scaling)
        self.compute()

    def compute(self) -> None:
        """Compute the tables of cosines and sines, buffers that are not saved with the weights."""
        cosines, sines = rotary_tables(*self.table)
        self.register_buffer("cosines", torch.from_numpy(cosines), persistent=False)
        self.register_buffer("sines", torch.from_numpy(sines), persistent=False)

    def forward(self, heads: Tensor, start: int = 0) -> Tensor:
        """Return queries or keys, batch x heads x T x head_dim, rotated. start: position of the first token."""
        seen = slice(start, start + heads.shape[-2])
        turned, kept = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
        first, second = turned.chunk(2, dim=-1)
        crossed = torch.cat((-second, first), dim=-1)
        return torch.cat((turned * self.cosines[seen] + crossed * self.sines[seen], kept), dim=-1)


@cache  # all layers of a model share them; numpy, as a model on `meta` would leave tensors without data here
def rotary_tables(
    context: int, rotary_dim: int, base: float, scaling: RotaryScaling | None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosines and sines of the angle of every position and rotated feature, each context x rotary_dim."""
    angles = np.arange(context)[:, None] * np.array(rotary_rates(rotary_dim, base, scaling))  # context x rotary_dim / 2
    cosines, sines = (np.tile(table(angles), 2).astype(np.float32) for table in (np.cos, np.sin))
    return cosines, sines
