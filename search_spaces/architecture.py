"""`Architecture`: everything about a decoder-only model that private inference is charged for, and nothing else.

Training choices that leave the deployed model unchanged (entropy regularisation, weight normalisation,
optimizer) belong to a recipe, not here; two models with equal `arch_id` cost the same.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from costmodel.config.schema import decode
from costmodel.config.strict_yaml import dump, load_mapping
from costmodel.errors import UserError
from costmodel.ops import RMSNORM_EPSILON, ROTARY_BASE, GeluForm, SoftmaxForm
from costmodel.rotary import RotaryScaling
from search_spaces.block import BLOCKS, Block, BlockName
from search_spaces.forms import (
    ATTENTIONS,
    CENTRED_NORMS,
    FFNS,
    FROZEN_NORMS,
    LIVE_NORMS,
    NORMS,
    POLYNOMIAL_GATES,
    Attention,
    Ffn,
    Inner,
    Norm,
    Stabiliser,
)
from search_spaces.inner import inner_norms, require_inner


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The choices of one decoder layer.

    norm1, norm2: normalisation before attention and before the feed-forward network (FFN). A `frozen-` norm is trained
        with its deviation frozen at a constant late in training, so that it is linear from then on.
    attention: softmax; `softmax-temperature`, with a learned temperature per head and query position; `softmax-half`,
        with half of the groups of heads that share a key and a value head, one at least; `2quad`, `power8`, `relu` and
        `bounded`, forms that are cheaper in private; `none` removes the attention.
    ffn: the activation between two linears, `gelu` in the architecture's form; `fused` is one trained d x d linear;
        `swiglu`, `geglu`, `reglu`, `quadglu` and `bilinear` are gated: two linears side by side, one of them through
        SiLU, GELU in the architecture's form, ReLU, x^2 - 1 or nothing, multiplied; the gate of the last two always has
        a bias; `none` removes the FFN.
    stabiliser: `scaled` gives the FFN sub-block `beta * A + FFN(A) / alpha` with one learned pair.
    inner1, inner2: what attention and FFN have of the block's norms of queries and keys, its norms after sub-layers and
        its cap of scores: all, all `uncapped`, or norms that are `frozen` as others are, and no cap; `none` when these
        are folded. In a space, the cap of logits goes with the last cap of scores (`implied_logit_cap`).

    Raises UserError if attention or FFN is removed but something of it is kept.
    """

    norm1: Norm = "none"
    attention: Attention = "softmax"
    norm2: Norm = "none"
    ffn: Ffn = "gelu"
    stabiliser: Stabiliser = "none"
    inner1: Inner = "own"
    inner2: Inner = "own"

    def __post_init__(self) -> None:
        if self.attention == "none" and self.norm1 != "none":
            raise UserError(
                f"a layer with attention 'none' has nothing to normalise, but got norm1={self.norm1!r}; "
                "set it to 'none'."
            )
        for part, inner in (("attention", "inner1"), ("ffn", "inner2")):
            if getattr(self, part) == "none" and getattr(self, inner) != "own":
                raise UserError(
                    f"a layer with {part} 'none' has no norms inside, but got {inner}={getattr(self, inner)!r}; leave "
                    "it out."
                )
        if self.ffn == "none" and (self.norm2 != "none" or self.stabiliser != "none"):
            raise UserError(
                f"a layer with ffn 'none' has nothing to normalise or scale, but got norm2={self.norm2!r}, "
                f"stabiliser={self.stabiliser!r}; set both to 'none'."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """How attention knows positions, and which it sees.

    rotates: whether queries and keys are rotated, in a block whose positions are rotations.
    base, scaling: of the angles; a base of None is the architecture's `rotary_base`.
    window: tokens that a query attends to, its own the last; None for all. Longer sequences are not computed.
    """

    rotates: bool = True
    base: float | None = None
    scaling: RotaryScaling | None = None
    window: int | None = None


SCALES = ("embedding_scale", "residual_scale", "logit_scale")
CAPS = ("score_cap", "logit_cap")
LEAST = {"rotary_base": 1.0, **dict.fromkeys(("norm_epsilon", "score_scale", *SCALES, *CAPS), 0.0)}  # all are above it


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A decoder-only language model, in elements and counts.

    block: its name in `search_spaces.block.BLOCKS`, whose facts are `block_facts`.
    num_kv_heads: heads of keys and of values, each shared by a group of query heads; None for as many as those.
    head_size: features of a head; None for d_model / num_heads.
    context: longest sequence the position table (or rotary cache) covers, in tokens, and no window hides any of.
    longest_context: of the model that this was imported from, where a window is shorter; None for `context`.
    final_norm: norm before the vocabulary projection.
    embedding_scale, residual_scale, logit_scale: what rows of the table, what attention and FFN add to the stream, and
        the logits are multiplied by.
    score_scale: what products of queries and keys are multiplied by; None for 1/sqrt(head_dim).
    score_cap, logit_cap: scores and logits x become cap * tanh(x / cap); None leaves them as they are.
    bias: whether linears carry a bias; those that do anyway are told by `has_bias`.
    rotary_base: of the angles of rotary positions, where the block has them.
    rotary_features: of a head that are rotated; None for the share that the block rotates.
    positions: the kinds of positions that its layers have; empty for the block's.
    layer_positions: of every layer, which of those; empty for the first in all layers.
    norm_epsilon: what RMSNorms add to a mean square; LayerNorms have a constant of their own.
    gelu: which form GELU is computed in, wherever a layer has one.
    softmax: the attention's normalisation, in every layer: softmax itself, or a form that is cheaper in private.

    folded: whether the linears have taken up the gains and biases of the blocks' LayerNorms, the scales, and the factor
        of the scores.

    Raises UserError if a dimension is below 1, heads do not divide what they share, or the block lacks what is chosen.
    """

    block: BlockName = "gpt2"
    num_heads: int
    num_kv_heads: int | None = None
    head_size: int | None = None
    d_model: int
    d_ff: int
    vocab_size: int
    context: int
    final_norm: Norm
    bias: bool = True
    tied_embeddings: bool = True
    gelu: GeluForm = "tanh"
    softmax: SoftmaxForm = "exact"
    rotary_base: float = ROTARY_BASE
    rotary_features: int | None = None
    positions: tuple[Positions, ...] = ()
    layer_positions: tuple[int, ...] = ()
    longest_context: int | None = None
    norm_epsilon: float = RMSNORM_EPSILON
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    folded: bool = False
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_size", "d_model", "d_ff", "vocab_size", "context"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"`{name}` must be at least 1, but got {value}.")
        for name, least in LEAST.items():
            if (number := getattr(self, name)) is not None and not least < number < math.inf:
                raise UserError(f"`{name}` must be finite and above {least:g}, but got {number}.")
        if not self.layers:
            raise UserError("an architecture needs at least one layer, but `layers` is empty.")
        if self.layer_positions and (
            len(self.layer_positions) != len(self.layers)
            or not all(0 <= place < len(self.positions) for place in self.layer_positions)
        ):
            raise UserError(
                f"`layer_positions` must name one of the {len(self.positions)} `positions` for each of "
                f"{len(self.layers)} layers, but got {list(self.layer_positions)}."
            )
        if self.head_size is None and self.d_model % self.num_heads:
            raise UserError(
                f"`num_heads` must divide `d_model`, but got num_heads={self.num_heads}, d_model={self.d_model}."
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise UserError(
                f"`num_kv_heads` must divide `num_heads`, but got num_kv_heads={self.num_kv_heads}, "
                f"num_heads={self.num_heads}."
            )
        if not self.block_facts.has_centred_norms and (centred := sorted(self.norms.intersection(CENTRED_NORMS))):
            raise UserError(
                f"block {self.block!r} has norms without a mean and bias, but got {centred[0]!r}; "
                "use 'rmsnorm', 'frozen-rmsnorm' or 'none'."
            )
        require_inner(self)
        if self.block_facts.is_shaped and (self.num_kv_heads, self.head_size) != (None, None):
            raise UserError(
                f"block {self.block!r} passes slices of the stream on, so its heads are d_model / num_heads wide and "
                "have keys of their own; leave `num_kv_heads` and `head_size` out."
            )
        if self.block_facts.is_shaped and any(layer.attention in ("none", "softmax-half") for layer in self.layers):
            raise UserError(
                f"block {self.block!r} passes the stream on through all its heads, so no layer of it can have "
                "attention 'none' or 'softmax-half'; use another block."
            )

    @property
    def block_facts(self) -> Block:
        """The facts of the block."""
        return BLOCKS[self.block]

    @property
    def norms(self) -> frozenset[Norm]:
        """Those of its layers and the last, `none` included."""
        inner = {norm for layer in self.layers for norm in inner_norms(self, layer).values()}
        return frozenset(
            {self.final_norm, *inner, *(norm for layer in self.layers for norm in (layer.norm1, layer.norm2))}
        )

    @property
    def num_layers(self) -> int:
        """How many decoder layers there are."""
        return len(self.layers)

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.head_size or self.d_model // self.num_heads

    @property
    def score_factor(self) -> float:
        """What products of queries and keys are multiplied by, unless the queries have taken it up."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale


def reader_norms(layer: Layer) -> list[Norm]:
    """The norms, or `none`, before what reads the residual stream in a layer."""
    return [layer.norm1] * (layer.attention != "none") + [layer.norm2] * (layer.ffn != "none")


def default_final_norm(layers: Iterable[Layer], least: int = 0) -> Norm:
    """The norm of highest rank that any layer has, as in GPT-2; a norm-free decoder keeps no norm at all.

    least: the rank of the norms that its block has anyway (`least_rank`).

    A frozen LayerNorm only where every block takes the mean away, else a frozen RMSNorm: only then can the bias of a
    final norm be folded (see `search_spaces.deployed`).
    """
    norms = [norm for layer in layers for norm in reader_norms(layer)]
    highest = max(least, *(NORMS[norm].rank for norm in norms), 0)
    return implied_final_norm(highest, centred=all(norm in CENTRED_NORMS for norm in norms))


def least_rank(block: Block) -> int:
    """The rank of the norms after sub-layers, if a block has any."""
    return NORMS["rmsnorm"].rank if block.norms_after else 0


def implied_final_norm(highest_rank: int, *, centred: bool) -> Norm:
    """The final norm of layers whose norms have this rank at most. centred: whether all of them take the mean away."""
    norm = {form.rank: norm for norm, form in NORMS.items()}[highest_rank]
    return "frozen-rmsnorm" if norm == "frozen-layernorm" and not centred else norm


def is_live(layer: Layer) -> bool:
    """Whether a layer keeps a norm that depends on the data when it is deployed."""
    return layer.norm1 in LIVE_NORMS or layer.norm2 in LIVE_NORMS


def has_frozen_norms(architecture: Architecture) -> bool:
    """Whether a norm is frozen late in training."""
    return not architecture.norms.isdisjoint(FROZEN_NORMS)


def num_kv_heads(architecture: Architecture, layer: Layer) -> int:
    """Key heads of a layer, as many as value heads: all of them, or half, at least one."""
    whole = architecture.num_kv_heads or architecture.num_heads
    return max(1, whole // 2) if layer.attention == "softmax-half" else whole


def num_heads(architecture: Architecture, layer: Layer) -> int:
    """Attention heads of a layer: as many for each of its key heads as the architecture has."""
    whole = architecture.num_kv_heads or architecture.num_heads
    return num_kv_heads(architecture, layer) * (architecture.num_heads // whole)


def has_bias(architecture: Architecture, layer: Layer, linear: str) -> bool:
    """Whether a linear of a layer, `ffn.up` for one, carries a bias; a gate that is a polynomial does in any block."""
    is_polynomial = linear == "ffn.gate" and layer.ffn in POLYNOMIAL_GATES
    return architecture.bias or is_polynomial or linear in architecture.block_facts.biases


def positions_of(architecture: Architecture, index: int) -> Positions:
    """The positions of a layer's attention."""
    if architecture.block_facts.rotary_share is None:
        return Positions(rotates=False)
    kinds = architecture.positions or (Positions(),)
    return kinds[architecture.layer_positions[index] if architecture.layer_positions else 0]


def with_layers(architecture: Architecture, layers: Iterable[Layer], places: Iterable[int]) -> Architecture:
    """Other layers, of which each attention has the positions of that of the layer in its place."""
    layers = tuple(layers)
    kept = [architecture.layer_positions[place] for place in places] if architecture.layer_positions else []
    return replace(architecture, layers=layers, layer_positions=tuple(kept))


def rotary_dim(architecture: Architecture) -> int:
    """Features of a head that are rotated, where a block's positions are rotations.

    Raises UserError if they are odd or more than the head has.
    """
    share = architecture.block_facts.rotary_share
    assert share is not None
    turned = architecture.rotary_features or max(2, architecture.head_dim // share)
    if turned % 2 or turned > architecture.head_dim:
        raise UserError(
            f"block {architecture.block!r} rotates one in {share} of a head's features (2 at least), which must be "
            f"even and no more than it has, but got head_dim={architecture.head_dim}; change `d_model` or `num_heads`."
        )
    return turned


def softmax_form(architecture: Architecture, layer: Layer) -> SoftmaxForm:
    """The form of a layer's softmax: its own, or the architecture's."""
    return ATTENTIONS[layer.attention].softmax or architecture.softmax


def has_bound(form: SoftmaxForm) -> bool:
    """Whether a learned, public number of each head is taken from its scores before."""
    return form in ("bounded", "power8")


def gelu_form(architecture: Architecture, layer: Layer) -> GeluForm | None:
    """The form of a layer's GELU, its own or the architecture's; None if it has none."""
    form = FFNS[layer.ffn].gelu
    return architecture.gelu if form == "own" else form


# fields from after there were ids
SINCE = (
    "softmax", "folded", "num_kv_heads", "head_size", "rotary_base", "norm_epsilon", "rotary_features", "positions",
    "layer_positions", "longest_context", *SCALES, "score_scale", *CAPS,
)  # fmt: skip


def canonical(architecture: Architecture) -> dict[str, Any]:
    """The architecture as plain data: a GELU form only where a layer has a GELU, and nothing of `SINCE` at its default.

    What is left out keeps the `arch_id` of every architecture from before there were these fields.
    """
    data = asdict(architecture)
    if all(FFNS[layer.ffn].gelu != "own" for layer in architecture.layers):
        del data["gelu"]
    for field in fields(architecture):
        if field.name in SINCE and data[field.name] == field.default:
            del data[field.name]
    data["layers"] = [
        {name: choice for name, choice in asdict(layer).items() if choice != "own"} for layer in architecture.layers
    ]
    if architecture.positions:
        data["positions"] = [_stated(positions) for positions in architecture.positions]
    return data


def _stated(data: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults, as plain data."""
    values = {
        field.name: getattr(data, field.name) for field in fields(data) if getattr(data, field.name) != field.default
    }
    return {name: _stated(value) if is_dataclass(value) else value for name, value in values.items()}


def arch_id(architecture: Architecture) -> str:
    """Twelve hexadecimal digits that name an architecture: SHA-256 of its canonical form."""
    text = json.dumps(canonical(architecture), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def scaled(architecture: Architecture, *, d_model: int, vocab_size: int, context: int) -> Architecture:
    """The same placement at another width, as a proxy trains it; d_ff and heads keep their ratio to d_model."""

    def resized(width: int) -> int:
        return max(1, width * d_model // architecture.d_model)

    head_size = None if architecture.head_size is None else resized(architecture.head_size)
    d_ff = resized(architecture.d_ff)
    return replace(
        architecture, d_model=d_model, d_ff=d_ff, head_size=head_size, vocab_size=vocab_size, context=context
    )


def load_architecture(path: Path) -> Architecture:
    """The architecture in a YAML file, written by `dump_architecture`. Raises UserError, naming the file."""
    return decode(Architecture, load_mapping(path), str(path))


def dump_architecture(architecture: Architecture) -> str:
    """YAML text that `load_architecture` reads back to an architecture of the same `arch_id`."""
    return dump(canonical(architecture))
