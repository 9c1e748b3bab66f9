"""The layers of `huggingface_model`: norms, attention and FFNs. Exports carry this file, so it imports only torch."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

LAYERNORM_EPSILON, RMSNORM_EPSILON = 1e-5, 1e-6
ROTARY_BASE = 10_000
QUAD_SHIFT, RELU_SUM_OFFSET = 5.0, 2.0**-10  # softmax `2quad` (MPCFormer, arXiv 2211.01452) and `relu`
# GELU by polynomials, after BumbleBee, https://eprint.iacr.org/2023/1678
THRESHOLDS = (-5.0, -1.97, 3.0)
CUBIC = (-0.3805503845214844, -0.2882499694824219, -0.07190322875976562, -0.0059051513671875)
EVEN = (0.0102691650390625, 0.3566856384277344, -0.036548614501953125, 0.001708984375)


class Past:
    """Cached keys and values of earlier positions, of every layer with attention, in order of execution."""

    def __init__(self, cache: Any | None) -> None:
        self.cache = cache
        self.num_positions = 0 if cache is None else int(cache.get_seq_length())
        self._place = 0

    def joined(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values to the cache and return all of them; each batch x heads x T x head_dim."""
        if self.cache is None:
            return keys, values
        place, self._place = self._place, self._place + 1
        keys_values: tuple[Tensor, Tensor] = self.cache.update(keys, values, place)
        return keys_values


class _Weight(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape))


class _FrozenNorm(_Weight):
    def __init__(self, features: int, *, centred: bool) -> None:
        super().__init__(features)
        self.bias = nn.Parameter(torch.zeros(features)) if centred else None

    def forward(self, source: Tensor) -> Tensor:
        if self.bias is None:
            return source * self.weight
        return torch.addcmul(self.bias, source - source.mean(dim=-1, keepdim=True), self.weight)


NORMS: dict[str, Callable[[int, float, bool], nn.Module]] = {
    "layernorm": lambda features, _, affine: nn.LayerNorm(features, LAYERNORM_EPSILON, elementwise_affine=affine),
    "rmsnorm": lambda features, epsilon, affine: nn.RMSNorm(features, epsilon, elementwise_affine=affine),
    "frozen-layernorm": lambda features, *_: _FrozenNorm(features, centred=True),
    "frozen-rmsnorm": lambda features, *_: _FrozenNorm(features, centred=False),
    "none": lambda *_: nn.Identity(),
}
# norms of queries and keys, and after sub-layers, by a layer's `inner1` or `inner2`
INNER_NORMS = {"own": "rmsnorm", "uncapped": "rmsnorm", "frozen": "frozen-rmsnorm", "none": "none"}
# replacements of softmax: a function of scores that is at least 0, and a constant that is added to its row sum
FORMS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "2quad": (lambda scores: (scores + QUAD_SHIFT).square(), 0.0),
    "power8": (lambda scores: scores.square().square().square(), 0.0),  # after Power-Softmax, arXiv 2410.09457
    "relu": (functional.relu, RELU_SUM_OFFSET),
}


def capped(source: Tensor, cap: float | None) -> Tensor:
    return source if cap is None else cap * torch.tanh(source / cap)


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, form: str, bound: Tensor | None, cap: float | None
) -> Tensor:
    """Return causal attention of the last T positions; queries: batch x heads x T x head_dim, keys and values over all.

    bound: one per head, subtracted from the scores; it cancels out of a softmax. cap: of the scores.
    """
    length, total = queries.shape[-2], keys.shape[-2]
    seen = torch.ones(length, total, dtype=torch.bool, device=queries.device).tril(total - length)
    if form not in FORMS and cap is None:
        return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen)
    scores = capped(queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1]), cap)
    if form not in FORMS:
        return scores.masked_fill(~seen, -math.inf).softmax(dim=-1) @ values
    scores = scores if bound is None else scores - bound[:, None, None]
    positive_of, offset = FORMS[form]
    positive = positive_of(scores).masked_fill(~seen, 0.0)
    if form == "power8" and length == total:
        positive[..., 0, 0] = 1.0  # alone in its row, and its power may be almost 0
    return positive / (positive.sum(dim=-1, keepdim=True) + offset) @ values


def _rotated(heads: Tensor, first: int, width: int, base: float, scaling: dict[str, Any] | None) -> Tensor:
    """Rotate the first features of positions from `first` on, by angles that grow with the position.

    scaling: divides rates, fully below `low` turns in the former context and not above `high` (costmodel.rotary).
    """
    length = heads.shape[-2]
    rates = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    if scaling is not None:
        scaling = {"low": 1.0, "high": 4.0, "context": 0, **scaling}
        turns = scaling["context"] * rates / (2 * math.pi)
        kept = ((turns - scaling["low"]) / (scaling["high"] - scaling["low"])).clamp(0, 1)
        rates = rates * (kept + (1 - kept) / scaling["factor"])
    angles = torch.arange(first, first + length, dtype=torch.float64)[:, None] * rates  # T x width / 2
    cosines, sines = (table.repeat(1, 2).to(heads) for table in (angles.cos(), angles.sin()))
    turned, kept = heads[..., :width], heads[..., width:]
    low, high = turned.chunk(2, dim=-1)
    return torch.cat((turned * cosines + torch.cat((-high, low), dim=-1) * sines, kept), dim=-1)


class _Attention(nn.Module):
    """Attention with softmax, or a form that replaces it, over cached and new positions."""

    def __init__(self, made: dict[str, Any], index: int) -> None:
        super().__init__()
        kind = made["layers"][index]["attention"]
        whole = made.get("num_kv_heads") or made["num_heads"]
        self.num_key_heads = max(1, whole // 2) if kind == "softmax-half" else whole
        self.num_heads = self.num_key_heads * (made["num_heads"] // whole)
        self.head_dim = made.get("head_size") or made["d_model"] // made["num_heads"]
        self.form = kind if kind in (*FORMS, "bounded") else made.get("softmax", "exact")
        self.rotary: tuple[int, float, dict[str, Any] | None] | None = None  # arguments of `_rotated`
        place = made["layer_positions"][index] if made.get("layer_positions") else 0
        positions = made["positions"][place] if made.get("positions") else {}
        if (share := made["block"]["rotary_share"]) is not None and positions.get("rotates", True):
            width = made.get("rotary_features") or max(2, self.head_dim // share)
            base = positions.get("base") or made.get("rotary_base", ROTARY_BASE)
            self.rotary = width, base, positions.get("scaling")
        scale = 1.0 if made.get("folded", False) else made.get("score_scale")
        self.factor = 1.0 if scale is None else scale * math.sqrt(self.head_dim)  # `_attend` divides by that root
        self.cap = made.get("score_cap") if made["layers"][index].get("inner1", "own") == "own" else None
        self.bound = _Weight(self.num_heads) if self.form in ("bounded", "power8") else None
        self.temperature = _Weight(self.num_heads, made["context"]) if kind == "softmax-temperature" else None

    def heads(self, part: Tensor) -> Tensor:
        """Reshape batch x T x (heads * head_dim) to batch x heads x T x head_dim."""
        return part.view(*part.shape[:2], -1, self.head_dim).transpose(1, 2)

    def mixed(self, queries: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
        """Return the attention output of the positions from `first` on."""
        queries = queries if self.factor == 1 else queries * self.factor
        if self.temperature is not None:
            rows = self.temperature.weight[:, first : first + queries.shape[-2]]  # heads x T
            queries = queries * rows.reciprocal().unsqueeze(-1)
        keys, values = (part.repeat_interleave(self.num_heads // self.num_key_heads, dim=1) for part in (keys, values))
        bound = None if self.bound is None else self.bound.weight
        return _attend(queries, keys, values, self.form, bound, self.cap)


def _has_bias(made: dict[str, Any], linear: str) -> bool:
    """Whether a linear of a layer, such as `ffn.up`, has a bias."""
    return made["bias"] or linear in (*made["block"].get("biases", ()), *made.get("biases", ()))


class SelfAttention(_Attention):
    def __init__(self, made: dict[str, Any], index: int) -> None:
        super().__init__(made, index)
        d_model = made["d_model"]
        width, key_width = self.num_heads * self.head_dim, self.num_key_heads * self.head_dim
        self.widths = {"q": width, "k": key_width, "v": key_width}
        self.packs = made["block"].get("packs_qkv", True)
        for name, features in {"qkv": width + 2 * key_width}.items() if self.packs else self.widths.items():
            setattr(self, name, nn.Linear(d_model, features, bias=_has_bias(made, f"attention.{name}")))
        norm = INNER_NORMS[made["layers"][index].get("inner1", "own")]
        if (kind := made["block"].get("query_key_norm", "none")) != "none" and norm != "none":
            is_shared = kind == "head" and norm == "rmsnorm"
            sizes = (self.head_dim, self.head_dim) if is_shared else (width, key_width)
            epsilon = made.get("norm_epsilon", RMSNORM_EPSILON)
            self.q_norm, self.k_norm = (NORMS[norm](size, epsilon, True) for size in sizes)
        self.out = nn.Linear(width, d_model, bias=_has_bias(made, "attention.out"))
        self.norm = _norm_after(made, norm)

    def forward(self, source: Tensor, past: Past) -> Tensor:
        first = past.num_positions
        made = [self.get_submodule(name)(source) for name in (["qkv"] if self.packs else self.widths)]
        parts = made[0].split([*self.widths.values()], dim=-1) if self.packs else made
        if hasattr(self, "q_norm"):
            parts = [_normed(self.q_norm, parts[0]), _normed(self.k_norm, parts[1]), parts[2]]
        queries, keys, values = map(self.heads, parts)
        if self.rotary is not None:
            queries, keys = (_rotated(part, first, *self.rotary) for part in (queries, keys))
        keys, values = past.joined(keys, values)
        mixed: Tensor = self.out(self.mixed(queries, keys, values, first).transpose(1, 2).flatten(2))
        return mixed if self.norm is None else self.norm(mixed)


def _norm_after(made: dict[str, Any], norm: str) -> nn.Module | None:
    """Return the norm at the end of attention or FFN; None if the block has none."""
    if not made["block"].get("norms_after", False) or norm == "none":
        return None
    return NORMS[norm](made["d_model"], made.get("norm_epsilon", RMSNORM_EPSILON), True)


def _normed(norm: nn.Module, source: Tensor) -> Tensor:
    """Normalise each group of as many features as an RMSNorm has."""
    if not isinstance(norm, nn.RMSNorm):
        frozen: Tensor = norm(source)
        return frozen
    normed: Tensor = norm(source.view(*source.shape[:-1], -1, *norm.normalized_shape))
    return normed.flatten(-2)


class ShapedSelfAttention(_Attention):
    """`a*I + b*softmax - c*C` per head, C the running mean; only layer 0 projects the values (arXiv 2311.01906)."""

    def __init__(self, made: dict[str, Any], index: int) -> None:
        super().__init__(made, index)
        d_model, bias = made["d_model"], made["bias"]
        self.qk = nn.Linear(d_model, 2 * d_model, bias=bias)
        self.v = nn.Linear(d_model, d_model, bias=bias) if index == 0 else nn.Identity()
        names = ("identity", "softmax", "uniform")
        self.shaped = nn.ParameterDict({name: nn.Parameter(torch.ones(self.num_heads)) for name in names})

    def forward(self, source: Tensor, past: Past) -> Tensor:
        first, length = past.num_positions, source.shape[1]
        queries, keys = map(self.heads, self.qk(source).chunk(2, dim=-1))
        passed = self.heads(self.v(source))
        keys, values = past.joined(keys, passed)
        counts = torch.arange(1, values.shape[-2] + 1, device=values.device, dtype=values.dtype)
        running_mean = (values.cumsum(dim=-2) / counts.unsqueeze(-1))[..., -length:, :]
        a, b, c = (self.shaped[name].view(-1, 1, 1) for name in ("identity", "softmax", "uniform"))
        shaped: Tensor = a * passed + b * self.mixed(queries, keys, values, first) - c * running_mean
        return shaped.transpose(1, 2).flatten(2)


def _piecewise_gelu(source: Tensor) -> Tensor:
    low, middle, high = THRESHOLDS
    tail, inside = source.clamp(low, middle), source.clamp(middle, high)
    square = inside.square()
    cubic = ((CUBIC[3] * tail + CUBIC[2]) * tail + CUBIC[1]) * tail + CUBIC[0]
    even = ((EVEN[3] * square + EVEN[2]) * square + EVEN[1]) * square + EVEN[0]
    below_high = torch.where(source < middle, cubic, inside / 2 + even)
    return torch.where(source < low, 0.0, torch.where(source < high, below_high, source))


GATES: dict[str, Any] = {
    "swiglu": functional.silu,
    "geglu": functional.gelu,  # in the architecture's form
    "reglu": functional.relu,
    "quadglu": lambda source: source.square() - 1,
    "bilinear": lambda source: source,
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu-tanh": partial(functional.gelu, approximate="tanh"),
    "gelu-exact": functional.gelu,
    "gelu-piecewise": _piecewise_gelu,
    "relu": functional.relu,
    "squared-relu": lambda source: functional.relu(source).square(),
    "square": torch.square,
    "identity": lambda source: source,
    **GATES,  # activations of gates
}


class _LeakyRelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(1))

    def forward(self, source: Tensor) -> Tensor:
        return functional.prelu(source, self.slope)


class _ScaledAdd(nn.Module):
    """`beta * stream + branch / alpha`."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, stream: Tensor, branch: Tensor) -> Tensor:
        return self.beta * stream + branch / self.alpha


class FeedForward(nn.Module):
    """An FFN that is added to the stream: two linears around an activation, maybe with a gate, or one fused linear."""

    def __init__(self, made: dict[str, Any], layer: dict[str, Any]) -> None:
        super().__init__()
        d_model, d_ff = made["d_model"], made["d_ff"]
        biases = {name: _has_bias(made, f"ffn.{name}") for name in ("gate", "up", "down", "fused")}
        self.fused = nn.Linear(d_model, d_model, bias=biases["fused"]) if layer["ffn"] == "fused" else None
        if self.fused is None:
            gate_bias = biases["gate"] or layer["ffn"] in ("quadglu", "bilinear")
            self.gate = nn.Linear(d_model, d_ff, bias=gate_bias) if layer["ffn"] in GATES else None
            self.up = nn.Linear(d_model, d_ff, bias=biases["up"])
            kind = f"gelu-{made.get('gelu', 'tanh')}" if layer["ffn"] in ("gelu", "geglu") else layer["ffn"]
            self.activation = _LeakyRelu() if kind == "leaky-relu" else ACTIVATIONS[kind]
            self.down = nn.Linear(d_ff, d_model, bias=biases["down"])
        self.scale = made.get("residual_scale", 1.0)
        self.norm = _norm_after(made, INNER_NORMS[layer.get("inner2", "own")])
        self.residual = _ScaledAdd() if layer["stabiliser"] == "scaled" else None

    def forward(self, source: Tensor, stream: Tensor) -> Tensor:
        if self.fused is not None:
            branch = self.fused(source)
        else:
            up = self.up(source)
            branch = self.down(self.activation(up) if self.gate is None else self.activation(self.gate(source)) * up)
        branch = branch if self.norm is None else self.norm(branch)
        branch = branch if self.scale == 1 else branch * self.scale
        joined: Tensor = stream + branch if self.residual is None else self.residual(stream, branch)
        return joined
