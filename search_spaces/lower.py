"""`lower` returns the op graph of an architecture for a prompt; `Workload.graphs` returns one op graph per new token.

As in the papers, embedding, layers and vocabulary projection by default compute all `seq_len` tokens of the prompt, for
one new token. `costmodel.deployment` rewrites the graph for other deployments.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from costmodel import ops
from costmodel.deployment.deploy import Deployment, check_new_tokens, deploy, generation
from costmodel.errors import UserError
from costmodel.ops import LayerId, Node, Op, OpGraph
from search_spaces.architecture import (
    Architecture,
    Layer,
    gelu_form,
    has_bias,
    has_bound,
    num_heads,
    num_kv_heads,
    positions_of,
    rotary_dim,
    softmax_form,
)
from search_spaces.block import QUERIES_KEYS_VALUES, Block
from search_spaces.forms import FFNS, Norm
from search_spaces.inner import inner_epsilon, inner_norms, score_cap

WHOLE_PROMPT = Deployment()


# norm -> function that makes its op, of: rows and features, the epsilon of RMSNorms, whether it has a gain (and bias)
NORM_OPS: dict[Norm, Callable[[dict[str, Any], float, bool], Op]] = {
    "layernorm": lambda size, epsilon, affine: ops.LayerNorm(**size, affine=affine),
    "rmsnorm": lambda size, epsilon, affine: ops.RmsNorm(**size, affine=affine, epsilon=epsilon),
    "frozen-layernorm": lambda size, epsilon, affine: ops.FrozenNorm(**size, centred=True),
    "frozen-rmsnorm": lambda size, epsilon, affine: ops.FrozenNorm(**size, centred=False),
}


@dataclass
class _Builder:
    """Collects nodes for `rows` tokens; a method returns the last node that it adds, or its source if it adds none."""

    architecture: Architecture
    rows: int
    nodes: list[Node] = field(default_factory=list)
    layer: LayerId = "embed"

    @property
    def block(self) -> Block:
        return self.architecture.block_facts

    @property
    def size(self) -> dict[str, Any]:
        """Rows and features of the residual stream."""
        return {"rows": self.rows, "features": self.architecture.d_model}

    def add(self, name: str, op: Op, *inputs: str) -> str:
        full = f"layers.{self.layer}.{name}" if isinstance(self.layer, int) else name
        self.nodes.append(Node(name=full, layer=self.layer, op=op, inputs=inputs))
        return full

    def linear(self, name: str, source: str, in_features: int, out_features: int) -> str:
        bias = has_bias(self.architecture, self.architecture.layers[int(self.layer)], name)
        op = ops.Linear(rows=self.rows, in_features=in_features, out_features=out_features, bias=bias)
        return self.add(name, op, source)

    def scaled(self, name: str, source: str, factor: float, features: int) -> str:
        if factor == 1:
            return source
        return self.add(name, ops.Scale(rows=self.rows, features=features, factor=factor), source)

    def norm(self, name: str, kind: Norm, source: str) -> str:
        if kind == "none":
            return source
        value_source = name == "norm1" and self.block.passes_values(int(self.layer))
        affine = not self.architecture.folded or self.layer == "head" or value_source  # else linears take them up
        return self.add(name, NORM_OPS[kind](self.size, self.architecture.norm_epsilon, affine), source)

    def capped(self, name: str, source: str, cap: float | None, size: dict[str, Any]) -> str:
        """Add cap * tanh(x / cap), element by element; nothing without a cap."""
        if cap is None:
            return source
        source = self.add(f"{name}.uncapped", ops.Scale(**size, factor=1 / cap), source)
        source = self.add(f"{name}.tanh", ops.Tanh(**size), source)
        return self.add(f"{name}.capped", ops.Scale(**size, factor=cap), source)

    def branch(self, name: str, layer: Layer, source: str) -> str:
        """Add the norm and scale between the output of attention or FFN and the residual addition."""
        kind = inner_norms(self.architecture, layer).get(f"{name}.norm")
        if kind is not None:
            epsilon = inner_epsilon(self.architecture, f"layers.{self.layer}.{name}.norm")
            source = self.add(f"{name}.norm", NORM_OPS[kind](self.size, epsilon, True), source)
        return self.scaled(f"{name}.scaled", source, self.architecture.residual_scale, self.architecture.d_model)


def lower(architecture: Architecture, seq_len: int, deployment: Deployment = WHOLE_PROMPT) -> OpGraph:
    """Return the op graph of an architecture for a prompt of `seq_len` tokens.

    In phase `decode`, it is the graph of the last of these tokens, with cached keys and values of the others. Raises
    UserError if `seq_len` is below 1 or above the model's context, the number of rotated features is odd or above
    `head_dim`, or the graph cannot be run in this deployment.
    """
    if not 1 <= seq_len <= architecture.context:
        why = ", beyond which attention has windows" if architecture.longest_context else ""
        raise UserError(f"`seq_len` must be between 1 and the context {architecture.context}{why}, but got {seq_len}.")
    builder, d_model, vocab = _Builder(architecture, seq_len), architecture.d_model, architecture.vocab_size
    embed = ops.TokenEmbedding(tokens=seq_len, vocab=vocab, features=d_model, scale=architecture.embedding_scale)
    stream = builder.add("embed", embed, "tokens")
    if "position" in builder.block.tables:
        stream = builder.add("position", ops.PositionEmbedding(rows=seq_len, features=d_model), stream)
    for index, layer in enumerate(architecture.layers):
        builder.layer = index
        stream = _layer(builder, layer, stream)
    builder.layer = "head"
    stream = builder.norm("final_norm", architecture.final_norm, stream)
    logits = builder.add("logits", ops.VocabProjection(rows=seq_len, features=d_model, vocab=vocab), stream)
    logits = builder.scaled("logits_scaled", logits, architecture.logit_scale, vocab)
    builder.capped("logits", logits, architecture.logit_cap, {"rows": seq_len, "features": vocab})
    return deploy(OpGraph(nodes=tuple(builder.nodes)), deployment)


def lower_with(
    architecture: Architecture, changes: Mapping[str, Any], num_tokens: int, deployment: Deployment
) -> OpGraph:
    """Return the op graph of a prompt of `num_tokens` tokens. changes: field of `deployment` -> new value."""
    # called in the parties' processes, which import this module fast, because it does not import torch
    return lower(architecture, num_tokens, replace(deployment, **changes))


def _layer(builder: _Builder, layer: Layer, stream: str) -> str:
    """Add attention and FFN, joined as in the block."""
    attended = stream
    if layer.attention != "none":
        normed = builder.norm("norm1", layer.norm1, stream)
        if builder.block.is_shaped:
            attended = _shaped_attention(builder, layer, normed)
        else:
            mixed = builder.branch("attention", layer, _self_attention(builder, layer, normed))
            attended = builder.add("attention.residual", ops.Add(**builder.size), stream, mixed)
    if layer.ffn == "none":
        return attended
    source = stream if builder.block.join == "parallel" else attended
    branch = builder.branch("ffn", layer, _ffn(builder, layer, builder.norm("norm2", layer.norm2, source)))
    join = ops.Add if layer.stabiliser == "none" else ops.ScaledAdd
    return builder.add("ffn.residual", join(**builder.size), attended, branch)


def _shaped_attention(builder: _Builder, layer: Layer, source: str) -> str:
    d_model, heads = builder.architecture.d_model, _heads(builder, layer)
    queries_keys = builder.linear("attention.qk", source, d_model, 2 * d_model)
    values = builder.linear("attention.v", source, d_model, d_model) if builder.layer == 0 else source
    weights = _attention_weights(builder, layer, queries_keys)
    shaped = builder.add("attention.shaped", ops.ShapedAttention(**heads), weights)
    mix = ops.AttentionMix(**heads, head_dim=builder.architecture.head_dim)
    return builder.add("attention.mix", mix, shaped, values)


def _self_attention(builder: _Builder, layer: Layer, source: str) -> str:
    """Add attention; key and value heads that query heads share are repeated."""
    architecture, rows, head_dim = builder.architecture, builder.rows, builder.architecture.head_dim
    heads, key_heads = num_heads(architecture, layer), num_kv_heads(architecture, layer)
    fewer = key_heads if key_heads < heads else None
    packed = _queries_keys_values(builder, layer, source, heads * head_dim, key_heads * head_dim)
    positions = positions_of(architecture, int(builder.layer))
    if positions.rotates:
        turned, base, scaling = rotary_dim(architecture), positions.base or architecture.rotary_base, positions.scaling
        rotary = ops.Rotary(rows=rows, heads=heads, rotary_dim=turned, key_heads=fewer, base=base, scaling=scaling)
        packed = builder.add("attention.rotary", rotary, packed)
    if fewer is not None:
        repeat = ops.RepeatHeads(rows=rows, heads=heads, key_heads=fewer, head_dim=head_dim)
        packed = builder.add("attention.repeat", repeat, packed)
    mix = ops.AttentionMix(**_heads(builder, layer), head_dim=head_dim)
    mixed = builder.add("attention.mix", mix, _attention_weights(builder, layer, packed), packed)
    return builder.linear("attention.out", mixed, heads * head_dim, architecture.d_model)


def _queries_keys_values(builder: _Builder, layer: Layer, source: str, width: int, key_width: int) -> str:
    """Add queries, keys and values side by side, from one linear or three."""
    d_model = builder.architecture.d_model
    if builder.block.packs_qkv:
        return builder.linear("attention.qkv", source, d_model, width + 2 * key_width)
    widths = zip(QUERIES_KEYS_VALUES, (width, key_width, key_width), strict=True)
    parts = [builder.linear(name, source, d_model, its_width) for name, its_width in widths]
    kinds = inner_norms(builder.architecture, layer)
    for place, (name, its_width) in enumerate((("attention.q_norm", width), ("attention.k_norm", key_width))):
        if (kind := kinds.get(name)) is not None:
            size = {"rows": builder.rows, "features": its_width}
            epsilon = inner_epsilon(builder.architecture, f"layers.{builder.layer}.{name}")
            norm = NORM_OPS[kind](size, epsilon, True)
            if isinstance(norm, ops.RmsNorm) and builder.block.query_key_norm == "head":
                norm = replace(norm, groups=its_width // builder.architecture.head_dim)
            parts[place] = builder.add(name, norm, parts[place])
    pack = ops.PackHeads(rows=builder.rows, query_features=width, key_features=key_width)
    return builder.add("attention.packed", pack, *parts)


def _attention_weights(builder: _Builder, layer: Layer, packed: str) -> str:
    """Add the scores, what changes them, and the softmax. packed: node that holds the queries and keys."""
    heads = _heads(builder, layer)
    scaled, factor = not builder.architecture.folded, builder.architecture.score_scale
    op = ops.AttentionScores(
        **heads,
        head_dim=builder.architecture.head_dim,
        scaled=scaled and factor != 1,
        factor=factor if scaled else None,
    )
    scores = builder.add("attention.scores", op, packed)
    if layer.attention == "softmax-temperature":
        scores = builder.add("attention.temperature", ops.Temperature(**heads), scores)
    size = {"rows": heads["heads"] * builder.rows, "features": builder.rows}
    scores = builder.capped("attention.scores", scores, score_cap(builder.architecture, layer), size)
    if has_bound(form := softmax_form(builder.architecture, layer)):
        scores = builder.add("attention.bound", ops.ScoreBound(**heads), scores)
    return builder.add("attention.softmax", ops.Softmax(**heads, form=form), scores)


def _heads(builder: _Builder, layer: Layer) -> dict[str, Any]:
    heads = num_heads(builder.architecture, layer)
    return {"heads": heads, "queries": builder.rows, "keys": builder.rows}


def _ffn(builder: _Builder, layer: Layer, source: str) -> str:
    d_model, d_ff = builder.architecture.d_model, builder.architecture.d_ff
    if layer.ffn == "fused":
        return builder.linear("ffn.fused", source, d_model, d_model)
    is_gated, size = FFNS[layer.ffn].is_gated, dict[str, Any](rows=builder.rows, features=d_ff)
    hidden = builder.linear("ffn.gate" if is_gated else "ffn.up", source, d_model, d_ff)
    for name, op in activation_ops(builder.architecture, layer, builder.rows).items():
        hidden = builder.add(f"ffn.{name}", op, hidden)
    if is_gated:
        up = builder.linear("ffn.up", source, d_model, d_ff)
        hidden = builder.add("ffn.product", ops.Multiply(**size), hidden, up)
    return builder.linear("ffn.down", hidden, d_ff, d_model)


def activation_ops(architecture: Architecture, layer: Layer, rows: int) -> dict[str, Op]:
    """Return the ops of the activation of a layer's FFN for `rows` tokens, in order: name -> op; empty if none."""
    form, size = FFNS[layer.ffn], {"rows": rows, "features": architecture.d_ff}
    if form.activation is None:
        return {}
    gelu = gelu_form(architecture, layer)
    first = form.activation(**size) if gelu is None else form.activation(**size, form=gelu)
    return {"activation": first} | ({} if form.then is None else {"then": form.then(**size)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The task that is priced: generate `new_tokens` tokens from a prompt of `prompt_len` tokens.

    The first run reads the prompt, in the given deployment; each later run reads one token and the KV cache. Costs of a
    workload are means per new token. A UserError is raised if `new_tokens` is below 1, or above 1 in phase decode.
    """

    prompt_len: int
    new_tokens: int = 1
    deployment: Deployment = field(default_factory=Deployment)

    def __post_init__(self) -> None:
        check_new_tokens(self.new_tokens, self.deployment)

    @property
    def words(self) -> str:
        """The workload in words, without default settings, such as `T=128, projection last, 4 new tokens`."""
        usual, chosen = asdict(Deployment()), asdict(self.deployment)
        words = [f"{name.replace('_', ' ')} {value}" for name, value in chosen.items() if value != usual[name]]
        words += [f"{self.new_tokens} new tokens"] if self.new_tokens > 1 else []
        return ", ".join((f"T={self.prompt_len}", *words))

    def graphs(self, architecture: Architecture) -> list[OpGraph]:
        """Return one op graph per new token. Raises UserError as `lower`, or if the tokens exceed the context."""
        return generation(
            partial(lower, architecture),
            prompt_len=self.prompt_len,
            new_tokens=self.new_tokens,
            deployment=self.deployment,
            context=architecture.context,
        )
