"""`lower`: the op graph of an architecture at a sequence length, one token's forward pass over the whole prompt.

Priced as the papers run it: the prompt of `seq_len` tokens goes through embedding, every layer and the vocabulary
projection (all positions), and one token comes out.
"""

from dataclasses import dataclass, field

from costmodel import ops
from costmodel.ops import LayerId, Node, Op, OpGraph
from search_spaces.architecture import Architecture, Layer

PYTHIA_ROTARY_SHARE = 4  # rotary covers head_dim // 4 features. Source: Biderman et al. 2023, Pythia configs.


@dataclass(kw_only=True)
class _Builder:
    """Collects nodes of the layer under construction; every method returns the name of the node it added."""

    architecture: Architecture
    seq_len: int
    nodes: list[Node] = field(default_factory=list)
    layer: LayerId = "embed"

    def add(self, name: str, op: Op, *inputs: str) -> str:
        full = f"layers.{self.layer}.{name}" if isinstance(self.layer, int) else name
        self.nodes.append(Node(name=full, layer=self.layer, op=op, inputs=inputs))
        return full

    def linear(self, name: str, source: str, in_features: int, out_features: int) -> str:
        op = ops.Linear(
            rows=self.seq_len, in_features=in_features, out_features=out_features, bias=self.architecture.bias
        )
        return self.add(name, op, source)

    def norm(self, name: str, kind: str, source: str) -> str:
        if kind == "none":
            return source
        return self.add(name, ops.LayerNorm(rows=self.seq_len, features=self.architecture.d_model), source)


def lower(architecture: Architecture, seq_len: int) -> OpGraph:
    """The op graph of `architecture` for a prompt of `seq_len` tokens.

    Raises ValueError if seq_len is below 1 or beyond the model's context.
    """
    if not 1 <= seq_len <= architecture.context:
        raise ValueError(f"`seq_len` must be between 1 and the context {architecture.context}, but got {seq_len}.")
    builder = _Builder(architecture=architecture, seq_len=seq_len)
    d_model, vocab = architecture.d_model, architecture.vocab_size
    stream = builder.add("embed", ops.TokenEmbedding(tokens=seq_len, vocab=vocab, features=d_model), "tokens")
    if architecture.block != "pythia":
        stream = builder.add("position", ops.PositionEmbedding(rows=seq_len, features=d_model), stream)
    for index, layer in enumerate(architecture.layers):
        builder.layer = index
        stream = _BLOCKS[architecture.block](builder, layer, stream)
    builder.layer = "head"
    stream = builder.norm("final_norm", architecture.final_norm, stream)
    builder.add("logits", ops.VocabProjection(rows=seq_len, features=d_model, vocab=vocab), stream)
    return OpGraph(nodes=tuple(builder.nodes))


def _gpt2(builder: _Builder, layer: Layer, stream: str) -> str:
    """A = X + MHA(Norm1(X)); Y = A + FFN(Norm2(A))."""
    normed = builder.norm("norm1", layer.norm1, stream)
    attended = _self_attention(builder, layer, normed)
    stream = _join(builder, "attention.residual", stream, attended)
    if layer.ffn == "none":
        return stream
    return _add_ffn(builder, layer, stream, _ffn(builder, layer, builder.norm("norm2", layer.norm2, stream)))


def _pythia(builder: _Builder, layer: Layer, stream: str) -> str:
    """Y = X + MHA(Norm1(X)) + FFN(Norm2(X)): attention and FFN read the same residual stream."""
    attended = _self_attention(builder, layer, builder.norm("norm1", layer.norm1, stream))
    joined = _join(builder, "attention.residual", stream, attended)
    if layer.ffn == "none":
        return joined
    return _add_ffn(builder, layer, joined, _ffn(builder, layer, builder.norm("norm2", layer.norm2, stream)))


def _sas(builder: _Builder, layer: Layer, stream: str) -> str:
    """A = shaped MHA(Norm1(X)) without skip, V and O identity (V is trained in layer 0); Y = A + FFN(Norm2(A))."""
    d_model = builder.architecture.d_model
    normed = builder.norm("norm1", layer.norm1, stream)
    heads = _heads(builder)
    queries_keys = builder.linear("attention.qk", normed, d_model, 2 * d_model)
    values = builder.linear("attention.v", normed, d_model, d_model) if builder.layer == 0 else normed
    weights = _attention_weights(builder, layer, queries_keys)
    shaped = builder.add("attention.shaped", ops.ShapedAttention(**heads), weights)
    mix = ops.AttentionMix(**heads, head_dim=builder.architecture.head_dim)
    attended = builder.add("attention.mix", mix, shaped, values)
    if layer.ffn == "none":
        return attended
    return _add_ffn(builder, layer, attended, _ffn(builder, layer, builder.norm("norm2", layer.norm2, attended)))


def _self_attention(builder: _Builder, layer: Layer, source: str) -> str:
    d_model = builder.architecture.d_model
    packed = builder.linear("attention.qkv", source, d_model, 3 * d_model)
    weights = _attention_weights(builder, layer, packed)
    mix = ops.AttentionMix(**_heads(builder), head_dim=builder.architecture.head_dim)
    mixed = builder.add("attention.mix", mix, weights, packed)
    return builder.linear("attention.out", mixed, d_model, d_model)


def _attention_weights(builder: _Builder, layer: Layer, packed: str) -> str:
    heads, head_dim = _heads(builder), builder.architecture.head_dim
    if builder.architecture.block == "pythia":
        rotary_dim = max(2, head_dim // PYTHIA_ROTARY_SHARE)
        rotary = ops.Rotary(rows=builder.seq_len, heads=heads["heads"], rotary_dim=rotary_dim)
        packed = builder.add("attention.rotary", rotary, packed)
    scores = builder.add("attention.scores", ops.AttentionScores(**heads, head_dim=head_dim), packed)
    if layer.attention == "softmax-temperature":
        scores = builder.add("attention.temperature", ops.Temperature(**heads), scores)
    return builder.add("attention.softmax", ops.Softmax(**heads), scores)


def _heads(builder: _Builder) -> dict[str, int]:
    return {"heads": builder.architecture.num_heads, "queries": builder.seq_len, "keys": builder.seq_len}


def _ffn(builder: _Builder, layer: Layer, source: str) -> str:
    d_model, d_ff = builder.architecture.d_model, builder.architecture.d_ff
    if layer.ffn == "fused":
        return builder.linear("ffn.fused", source, d_model, d_model)
    hidden = builder.linear("ffn.up", source, d_model, d_ff)
    rows = builder.seq_len
    if layer.ffn == "gelu":
        gelu = ops.Gelu(rows=rows, features=d_ff, form=builder.architecture.gelu)
        hidden = builder.add("ffn.activation", gelu, hidden)
    elif layer.ffn == "relu":
        hidden = builder.add("ffn.activation", ops.Relu(rows=rows, features=d_ff), hidden)
    elif layer.ffn == "leaky-relu":
        hidden = builder.add("ffn.activation", ops.LeakyRelu(rows=rows, features=d_ff), hidden)
    return builder.linear("ffn.down", hidden, d_ff, d_model)


def _join(builder: _Builder, name: str, stream: str, branch: str) -> str:
    return builder.add(name, ops.Add(rows=builder.seq_len, features=builder.architecture.d_model), stream, branch)


def _add_ffn(builder: _Builder, layer: Layer, stream: str, branch: str) -> str:
    if layer.stabiliser == "none":
        return _join(builder, "ffn.residual", stream, branch)
    scaled = ops.ScaledAdd(rows=builder.seq_len, features=builder.architecture.d_model)
    return builder.add("ffn.residual", scaled, stream, branch)


_BLOCKS = {"gpt2": _gpt2, "pythia": _pythia, "sas": _sas}
