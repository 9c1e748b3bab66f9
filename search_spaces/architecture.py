"""`Architecture`: everything about a decoder-only model that its cost under private inference depends on.

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

from costmodel.config.files import dump, load_file
from costmodel.errors import UserError
from costmodel.ops import RMSNORM_EPSILON, ROTARY_BASE, GeluForm, SoftmaxForm
from search_spaces.block import BLOCKS, Block, BlockName, Linear
from search_spaces.forms import (
    ATTENTIONS,
    CENTRED_NORMS,
    FFNS,
    FROZEN_NORMS,
    LIVE_NORMS,
    NORMS,
    OF_FEWER_HEADS,
    POLYNOMIAL_GATES,
    POLYNOMIALS,
    Attention,
    Ffn,
    Inner,
    Norm,
    Stabiliser,
)
from search_spaces.inner import inner_norms, require_inner
from search_spaces.positions import Positions


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """The choices of one decoder layer.

    norm1, norm2: norm before attention and before the feed-forward network (FFN). The deviation of a `frozen-` norm
        becomes a constant during training, so that the norm is linear from then on.
    attention: softmax; `softmax-temperature` has a learned temperature per head and query position; `softmax-half` has
        half of the key heads (at least one) with their query heads; `2quad`, `power8`, `relu` and `bounded` are other
        forms of softmax; `none` removes the attention.
    ffn: activation between two linears (`gelu` in the architecture's form, none for `identity`); `fused` is one trained
        linear; `swiglu`, `geglu`, `reglu`, `quadglu` and `bilinear` are gated: the product of two parallel
        linears, one of which passes through SiLU, GELU, ReLU, x^2 - 1 or nothing; the gate of the last two always has
        a bias; `none` removes the FFN.
    stabiliser: with `scaled`, the FFN's output F is added to the residual stream A as `beta * A + F / alpha`, with
        learned alpha and beta; with `none`, as `A + F`.
    inner1, inner2: what attention and FFN keep of the block's inner norms (of queries and keys, and after sub-layers)
        and score cap: `own` keeps all, `uncapped` all but the cap, `frozen` has frozen norms and no cap, and `none` is
        what folding leaves of `frozen`. `parse` and search spaces drop the logit cap of a model with a score cap if no
        layer keeps the latter.

    Raises UserError if attention or FFN is `none`, but its norm, its `inner1` or `inner2`, or the stabiliser is set.
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


SCALES = ("embedding_scale", "residual_scale", "logit_scale")
CAPS = ("score_cap", "logit_cap")
EPSILONS = ("norm_epsilon", "inner_norm_epsilon")
LEAST = {"rotary_base": 1.0, **dict.fromkeys((*EPSILONS, "score_scale", *SCALES, *CAPS), 0.0)}  # exclusive


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A decoder-only language model; its sizes are numbers of features, heads, layers or tokens.

    block: name of the block in `search_spaces.block.BLOCKS`, whose facts are `block_facts`.
    num_kv_heads: number of key heads, and of value heads; each is shared by a group of query heads. None for one per
        query head.
    head_size: features of a head; None for d_model / num_heads.
    context: largest number of tokens in a sequence: size of the position table or rotary cache, or a shorter window.
    longest_context: context of the imported model if its shortest window is smaller; None if it equals `context`.
    final_norm: norm before the vocabulary projection.
    embedding_scale, residual_scale, logit_scale: factors of token embeddings, of the outputs of attention and FFN
        before they are added to the residual stream, and of the logits.
    score_scale: factor of the products of queries and keys; None for 1/sqrt(head_dim).
    score_cap, logit_cap: scores and logits x become cap * tanh(x / cap); None for no cap.
    bias: whether the linears of layers have a bias; `has_bias` says which always have one.
    biases: linears that have a bias even if `bias` is False, besides those of the block.
    rotary_base: base of the rotary angles, if the block has rotary positions.
    rotary_features: number of rotated features of a head; None for the block's share.
    positions: the distinct `Positions` of the layers; empty if all layers have the default, `Positions()`.
    layer_positions: index into `positions` for every layer; empty if all layers have the first of them.
    norm_epsilon: constant that RMSNorms add to the mean square; LayerNorms add 1e-5 to the variance.
    inner_norm_epsilon: the same for norms of queries, keys, and outputs of attention and FFN; None for `norm_epsilon`.
    inner_scales: pairs of such a norm's node and a factor of its input; the norm adds the constant x factor^2.
    gelu: form of GELU in layers whose `ffn` is `gelu` or `geglu`.
    softmax: form of softmax in layers whose `attention` does not name a form.
    folded: whether this is a folded form (`search_spaces.deployed`), whose weights include scales and score factor.

    Raises UserError if a size, factor, cap, base or epsilon is out of range (except `longest_context`,
    `rotary_features` and what `positions` hold), `layers` is empty, heads do not divide `d_model` and there is no
    `head_size`, key heads do not divide heads, `layer_positions` does not fit the layers, or the block does not support
    a layer's choice, the final norm, `num_kv_heads` or `head_size`.
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
    biases: tuple[Linear, ...] = ()
    tied_embeddings: bool = True
    gelu: GeluForm = "tanh"
    softmax: SoftmaxForm = "exact"
    rotary_base: float = ROTARY_BASE
    rotary_features: int | None = None
    positions: tuple[Positions, ...] = ()
    layer_positions: tuple[int, ...] = ()
    longest_context: int | None = None
    norm_epsilon: float = RMSNORM_EPSILON
    inner_norm_epsilon: float | None = None
    inner_scales: tuple[tuple[str, float], ...] = ()
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
        if self.block_facts.is_shaped and any(layer.attention in OF_FEWER_HEADS for layer in self.layers):
            raise UserError(
                f"block {self.block!r} passes the stream on through all its heads, so no layer of it can have "
                "attention 'none' or 'softmax-half'; use another block."
            )

    @property
    def block_facts(self) -> Block:
        """The entry of the architecture's block in `BLOCKS`."""
        return BLOCKS[self.block]

    @property
    def norms(self) -> frozenset[Norm]:
        """The kinds of norm in the model, also of inner norms and the final norm; with `none` if a norm is left out."""
        inner = {norm for layer in self.layers for norm in inner_norms(self, layer).values()}
        return frozenset({self.final_norm, *inner, *(norm for one in self.layers for norm in (one.norm1, one.norm2))})

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.head_size or self.d_model // self.num_heads

    @property
    def score_factor(self) -> float:
        """Factor of the products of queries and keys in a model that is not folded."""
        return self.head_dim**-0.5 if self.score_scale is None else self.score_scale


def reader_norms(layer: Layer) -> list[Norm]:
    """Return the norms (`none` included) before attention and before FFN, for each of these that the layer has."""
    return [layer.norm1] * (layer.attention != "none") + [layer.norm2] * (layer.ffn != "none")


def default_final_norm(layers: Iterable[Layer], least: int = 0) -> Norm:
    """Return the final norm that layers imply: the norm of highest rank (`NormForm`) before an attention or FFN.

    A frozen LayerNorm becomes a frozen RMSNorm unless every attention and FFN has a norm before it that subtracts the
    mean, since only then can the bias of a frozen final norm be folded (see `search_spaces.deployed`).

    least: rank of the block's norms after sub-layers (`least_rank`), which count too; 0 if it has none.
    """
    norms = [norm for layer in layers for norm in reader_norms(layer)]
    highest = max(least, *(NORMS[norm].rank for norm in norms), 0)
    return implied_final_norm(highest, centred=all(norm in CENTRED_NORMS for norm in norms))


def least_rank(block: Block) -> int:
    """Return the rank of the RMSNorms that a block has after sub-layers; 0, the rank of no norm, without such norms."""
    return NORMS["rmsnorm"].rank if block.norms_after else 0


def implied_final_norm(highest_rank: int, *, centred: bool) -> Norm:
    """Return `default_final_norm` of layers from the highest rank of their norms and whether all subtract the mean."""
    norm = {form.rank: norm for norm, form in NORMS.items()}[highest_rank]
    return "frozen-rmsnorm" if norm == "frozen-layernorm" and not centred else norm


def is_live(layer: Layer) -> bool:
    """Whether a layer has, before attention or FFN, a norm that still depends on the data after folding."""
    return layer.norm1 in LIVE_NORMS or layer.norm2 in LIVE_NORMS


def has_frozen_norms(architecture: Architecture) -> bool:
    """Whether the model has any norm whose deviation becomes a constant during training."""
    return not architecture.norms.isdisjoint(FROZEN_NORMS)


def num_kv_heads(architecture: Architecture, layer: Layer) -> int:
    """Return the number of key heads of a layer: the architecture's, or half of it, at least 1, for `softmax-half`."""
    whole = architecture.num_kv_heads or architecture.num_heads
    return max(1, whole // 2) if layer.attention == "softmax-half" else whole


def num_heads(architecture: Architecture, layer: Layer) -> int:
    """Return the number of query heads of a layer; each key head serves as many of them as in the architecture."""
    whole = architecture.num_kv_heads or architecture.num_heads
    return num_kv_heads(architecture, layer) * (architecture.num_heads // whole)


def has_bias(architecture: Architecture, layer: Layer, linear: str) -> bool:
    """Whether a linear of a layer, such as `ffn.up`, has a bias.

    Linears that take up the coefficients of a polynomial activation (`POLYNOMIALS`) always have one.
    """
    fitted = ("ffn.gate",) if layer.ffn in POLYNOMIAL_GATES else ("ffn.up", "ffn.down")
    is_polynomial = layer.ffn in POLYNOMIALS and linear in fitted
    return architecture.bias or is_polynomial or linear in (*architecture.biases, *architecture.block_facts.biases)


def positions_of(architecture: Architecture, index: int) -> Positions:
    """Return the `Positions` of layer `index`, from 0; without rotation in a block with a table of positions."""
    if architecture.block_facts.rotary_share is None:
        return Positions(rotates=False)
    kinds = architecture.positions or (Positions(),)
    return kinds[architecture.layer_positions[index] if architecture.layer_positions else 0]


def with_layers(architecture: Architecture, layers: Iterable[Layer], places: Iterable[int]) -> Architecture:
    """Return the architecture with other layers; new layer i has the positions of the present layer `places[i]`."""
    layers = tuple(layers)
    kept = [architecture.layer_positions[place] for place in places] if architecture.layer_positions else []
    return replace(architecture, layers=layers, layer_positions=tuple(kept))


def rotary_dim(architecture: Architecture) -> int:
    """Return the number of rotated features of a head, for a block with rotary positions.

    Raises UserError if that number is odd or above `head_dim`.
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
    """Return the form of a layer's softmax: the form that its `attention` names, or else the architecture's."""
    return ATTENTIONS[layer.attention].softmax or architecture.softmax


def has_bound(form: SoftmaxForm) -> bool:
    """Whether this form of softmax subtracts a public bound per head from the scores (`costmodel.ops.ScoreBound`)."""
    return form in ("bounded", "power8")


def gelu_form(architecture: Architecture, layer: Layer) -> GeluForm | None:
    """Return the form of a layer's GELU: the form that its `ffn` names, or the architecture's; None without GELU."""
    form = FFNS[layer.ffn].gelu
    return architecture.gelu if form == "own" else form


# fields added after `arch_id` was first used; at their defaults they are left out, so that earlier ids stay the same
SINCE = (
    "softmax", "folded", "num_kv_heads", "head_size", "rotary_base", *EPSILONS, "rotary_features", "positions",
    "layer_positions", "longest_context", "inner_scales", *SCALES, "score_scale", *CAPS, "biases",
)  # fmt: skip


def canonical(architecture: Architecture) -> dict[str, Any]:
    """Return the fields as plain data, without some values that need not be stated.

    These are an unused `gelu`, `own` as `inner1` or `inner2`, and the defaults of `Positions` and of fields in `SINCE`.
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
    """Return the fields of a dataclass that differ from their defaults, as plain data."""
    values = {
        field.name: getattr(data, field.name) for field in fields(data) if getattr(data, field.name) != field.default
    }
    return {name: _stated(value) if is_dataclass(value) else value for name, value in values.items()}


def arch_id(architecture: Architecture) -> str:
    """Return twelve hexadecimal digits of the SHA-256 of `canonical`, which identify the architecture."""
    text = json.dumps(canonical(architecture), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def scaled(architecture: Architecture, *, d_model: int, vocab_size: int, context: int) -> Architecture:
    """Return the architecture at other sizes; `d_ff`, `head_size` and `rotary_features` keep their ratios to `d_model`.

    They are rounded down to at least 1, and `rotary_features`, which are rotated in pairs, to an even number of at
    least 2. Raises UserError for sizes that `Architecture` refuses.
    """
    sizes: dict[str, Any] = {"d_model": d_model, "vocab_size": vocab_size, "context": context}
    for name, step in (("d_ff", 1), ("head_size", 1), ("rotary_features", 2)):
        if (width := getattr(architecture, name)) is not None:
            sizes[name] = max(step, width * d_model // architecture.d_model // step * step)
    return replace(architecture, **sizes)


def load_architecture(path: Path) -> Architecture:
    """Return the architecture in a YAML file, as `dump_architecture` makes it. Raises UserError if it is not valid."""
    return load_file(Architecture, path)


def dump_architecture(architecture: Architecture) -> str:
    """Return the architecture as YAML text; `load_architecture` returns one of the same `arch_id` from it."""
    return dump(canonical(architecture))
