"""Models that nobody here wrote: transformers' decoders, plain modules, and what cannot be traced."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from costmodel import ops
from costmodel.ops import RMSNORM_EPSILON, ROTARY_BASE
from costmodel.tracing.trace import trace
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from tests.costmodel.tracing.models import SEQ_LEN, SIZE, VOCAB, gpt2, llama, pythia, qwen2


class Small(nn.Module):
    """A table, something in between, and a projection."""

    def __init__(self, between, **modules):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB, bias=False)
        self.between = between
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, tokens):
        return self.head(self.between(self, self.table(tokens)))


def middle(model):
    """The ops between table and projection."""
    return [node.op for node in trace(model, SEQ_LEN)][1:-1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("make", "base", "gelu"),
    [(gpt2, "gpt2-small", "tanh"), (partial(pythia, intermediate_size=128), "pythia-70m", "exact")],
)
def test_transformers_models_cost_what_ours_do(graph_of, make, base, gelu, attention):
    traced = trace(make(attn_implementation=attention), SEQ_LEN)
    ours = graph_of("SM+LN+G", SEQ_LEN, base, layers=2, heads=4, d_model=32, vocab=VOCAB, gelu=gelu)
    assert Counter((node.layer, node.op) for node in traced) == Counter((node.layer, node.op) for node in ours)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("make", "block", "sizes"),
    [
        (llama, "llama", {"num_kv_heads": 2}),
        (partial(llama, head_dim=6), "llama", {"num_kv_heads": 2, "head_size": 6}),
        (partial(llama, num_key_value_heads=4), "llama", {"num_kv_heads": None}),
        (qwen2, "qwen2", {"num_kv_heads": 2}),
    ],
)
def test_llamas_of_transformers_are_ours_op_for_op(make, block, sizes, attention):
    """In order; a trace does not read what has no price, the epsilon of norms and the base of angles."""
    base = base_architecture(
        "smollm2-135m", Dimensions(layers=2, heads=4, kv_heads=2, d_model=32, d_ff=48, vocab=VOCAB)
    )
    assert SIZE["intermediate_size"] == base.d_ff
    base = replace(base, rotary_base=ROTARY_BASE, norm_epsilon=RMSNORM_EPSILON)
    ours = lower(replace(base, block=block, **sizes), SEQ_LEN)
    traced = trace(make(attn_implementation=attention), SEQ_LEN)
    assert [(node.layer, node.op) for node in traced] == [(node.layer, node.op) for node in ours]


def test_shared_key_heads_are_repeated_after_their_rotation():
    nodes = {node.name: node for node in trace(llama(), SEQ_LEN)}
    packed, rotary, repeat = (nodes[f"model.layers.1.self_attn.{part}"] for part in ("packed", "rotary", "repeat"))
    assert packed.inputs == tuple(f"model.layers.1.self_attn.{part}_proj" for part in "qkv")
    assert rotary.op == ops.Rotary(rows=SEQ_LEN, heads=4, rotary_dim=8, key_heads=2)
    assert repeat.op == ops.RepeatHeads(rows=SEQ_LEN, heads=4, key_heads=2, head_dim=8)
    assert (rotary.inputs, repeat.inputs) == ((packed.name,), (rotary.name,))


def test_nodes_are_named_by_modules_and_belong_to_layers():
    layers = {node.name: node.layer for node in trace(gpt2(), SEQ_LEN)}
    assert [layers["transformer.wte"], layers["transformer.wpe"]] == ["embed", "embed"]
    assert [layers["transformer.h.0.attn.softmax"], layers["transformer.h.1.mlp.c_fc"]] == [0, 1]
    assert [layers["transformer.ln_f"], layers["lm_head"]] == ["head", "head"]


ROWS: Any = {"rows": SEQ_LEN, "features": 32}


def spelled_norm(centre, root):
    def norm(model, x):
        x = x - x.mean(-1, keepdim=True) if centre else x
        return root(x) * model.gain + model.bias if hasattr(model, "bias") else root(x)

    return norm


def inverse_root(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def root_below(x):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def variance_root(model, x, unbiased=False):
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=unbiased) + 1e-5)


def gain_and_bias():
    return {name: nn.Parameter(torch.ones(32)) for name in ("gain", "bias")}


NORMS = nn.ModuleList([nn.RMSNorm(32), nn.LayerNorm(32), nn.LayerNorm(32, elementwise_affine=False)])
SCALES = nn.ParameterList([torch.ones(()), torch.ones(1)])
RELU = ops.Relu(**ROWS)
BARE = ops.LayerNorm(**ROWS, affine=False)
# what stands between table and projection, its modules, and its ops
SPELLED = {
    "gelu": (lambda model, x: functional.gelu(x), {}, [ops.Gelu(**ROWS, form="exact")]),
    "gelu by erf": (lambda model, x: x * 0.5 * (1 + torch.erf(x / 2**0.5)), {}, [ops.Gelu(**ROWS, form="exact")]),
    "fast gelu": (
        lambda model, x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
        {},
        [ops.Gelu(**ROWS, form="tanh")],
    ),
    "silu": (lambda model, x: x * torch.sigmoid(x), {}, [ops.Silu(**ROWS)]),
    "relu": (lambda model, x: x.clamp(min=0), {}, [RELU]),
    "leaky relu": (lambda model, x: functional.leaky_relu(x, 0.1), {}, [ops.LeakyRelu(**ROWS)]),
    "square": (lambda model, x: torch.square(x), {}, [ops.Square(**ROWS)]),
    "power of 2": (lambda model, x: x**2, {}, [ops.Square(**ROWS)]),
    "a square less 1": (lambda model, x: x**2 - 1, {}, [ops.Square(**ROWS, shift=-1.0)]),
    "tanh": (lambda model, x: torch.tanh(x), {}, [ops.Tanh(**ROWS)]),
    "logistic": (lambda model, x: 1 / (1 + torch.exp(-x)), {}, [ops.Sigmoid(**ROWS)]),
    "norms": (
        lambda model, x: nn.Sequential(*model.norms)(x),
        {"norms": NORMS},
        [ops.RmsNorm(**ROWS), ops.LayerNorm(**ROWS), BARE],
    ),
    "norm by inverse root": (spelled_norm(True, inverse_root), gain_and_bias(), [ops.LayerNorm(**ROWS)]),
    "norm by root below": (spelled_norm(True, root_below), gain_and_bias(), [ops.LayerNorm(**ROWS)]),
    "bare norm by inverse root": (spelled_norm(True, inverse_root), {}, [BARE]),
    "bare norm by root below": (spelled_norm(True, root_below), {}, [BARE]),
    "rms norm by inverse root": (spelled_norm(False, inverse_root), {}, [ops.RmsNorm(**ROWS, affine=False)]),
    "rms norm by root below": (spelled_norm(False, root_below), {}, [ops.RmsNorm(**ROWS, affine=False)]),
    "variance": (variance_root, {}, [BARE]),
    "product": (lambda model, x: x.relu() * 0.22, {}, [RELU, ops.Scale(**ROWS, factor=0.22)]),
    "quotient": (lambda model, x: x.relu() / 8, {}, [RELU, ops.Scale(**ROWS, factor=0.125)]),
    "tensor": (lambda model, x: torch.tensor(3.0) * x.relu(), {}, [RELU, ops.Scale(**ROWS, factor=3.0)]),
    "one": (lambda model, x: (1.0 * x).relu() * 1.0 / 1, {}, [RELU]),
    "tensor of one": (lambda model, x: x.relu() * torch.ones(1), {}, [RELU]),
    "both": (lambda model, x: x.relu() * 0.5 * 3.0, {}, [RELU, *(ops.Scale(**ROWS, factor=f) for f in (0.5, 3.0))]),
    "first token": (lambda model, x: x[:, 0], {}, [ops.TakeRows(**ROWS, taken=1)]),
    "last token as a slice": (lambda model, x: x[:, -1:], {}, [ops.TakeRows(**ROWS, taken=1, first=SEQ_LEN - 1)]),
    "last token": (lambda model, x: x[:, -1], {}, [ops.TakeRows(**ROWS, taken=1, first=SEQ_LEN - 1)]),
    "third token": (lambda model, x: x[:, 2], {}, [ops.TakeRows(**ROWS, taken=1, first=2)]),
    "learned scalars": (
        lambda model, x: model.scales[0] * x + x / model.scales[1],
        {"scales": SCALES},
        [ops.ScaledAdd(**ROWS)],
    ),
}


@pytest.mark.parametrize("name", SPELLED)
def test_what_stands_between_table_and_projection_is_told(name):
    between, modules, expected = SPELLED[name]
    assert middle(Small(between, **modules)) == expected


@pytest.mark.parametrize(
    ("cut", "first"),
    [
        (lambda x: x.chunk(2, -1)[1], 16),
        (lambda x: x.split([12, 16, 4], dim=2)[1], 12),
        (lambda x: x[..., :-8][..., 8:], 8),
        (lambda x: x.narrow(-1, 3, 16).clone(), 3),
        (lambda x: x[..., ::2], None),  # columns that are not adjacent are priced, and not run
        (lambda x: x.view(1, SEQ_LEN, 4, 8)[..., :4].reshape(1, SEQ_LEN, 16), None),
    ],
)
def test_a_part_of_the_columns_is_an_op(cut, first):
    columns = [] if first is None else [ops.TakeColumns(**ROWS, taken=16, first=first)]
    model = Small(lambda model, x: model.up(cut(x).relu()), up=nn.Linear(16, 32))
    assert middle(model)[:-1] == [*columns, ops.Relu(rows=SEQ_LEN, features=16)]


def test_columns_that_two_ops_read_are_taken_once():
    doubled = Small(lambda model, x: model.up((y := x.chunk(2, -1)[1]).relu() + y), up=nn.Linear(16, 32))
    assert [type(op) for op in middle(doubled)] == [ops.TakeColumns, ops.Relu, ops.Add, ops.Linear]


def test_columns_with_the_same_start_have_names_of_their_own():
    both = Small(
        lambda model, x: model.few(x[..., :8]) + model.many(x[..., :16]), few=nn.Linear(8, 32), many=nn.Linear(16, 32)
    )
    taken = {node.name: node.op.taken for node in trace(both, SEQ_LEN) if isinstance(node.op, ops.TakeColumns)}
    assert list(taken.values()) == [8, 16]


@pytest.mark.parametrize("factor", [1.0, torch.ones(()), 12.0])
def test_a_table_is_read_once(factor):
    """A factor is in the table only where nothing reads the table without it."""
    alone = trace(Small(lambda model, x: functional.relu(x * factor)), SEQ_LEN)
    assert [type(node.op) for node in alone] == [ops.TokenEmbedding, ops.Relu, ops.VocabProjection]
    for copied in (lambda x: x, torch.clone):
        twice = trace(Small(lambda model, x, copied=copied: (y := copied(x)) * factor + y.relu()), SEQ_LEN)
        assert sum(isinstance(node.op, ops.TokenEmbedding) for node in twice) == 1
        assert sum(isinstance(node.op, ops.Scale) for node in twice) == (factor == 12.0)


def test_learned_and_empty_factors_and_other_variances_are_no_op():
    learned = Small(lambda model, x: x.relu() * model.gain, gain=nn.Parameter(torch.ones(1)))
    for model in (learned, Small(lambda model, x: x.relu() * 0.0)):
        with pytest.raises(ValueError, match="no op stands for: aten.mul.Tensor"):
            trace(model, SEQ_LEN)
    with pytest.raises(ValueError, match="no op stands for"):
        trace(Small(lambda model, x: variance_root(model, x, unbiased=True)), SEQ_LEN)
    with pytest.raises(ValueError, match="no op stands for"):  # the mean square is of something else
        trace(Small(lambda model, x: x * torch.rsqrt(x.relu().pow(2).mean(-1, keepdim=True) + 1e-5)), SEQ_LEN)


def test_columns_that_nobody_reads_are_not_priced():
    def attend(model, x):
        heads = x.view(1, SEQ_LEN, 4, 8).transpose(1, 2)
        both = functional.scaled_dot_product_attention(heads, heads, torch.cat((heads, heads), dim=-1), is_causal=True)
        return both[..., :8].transpose(1, 2).reshape(1, SEQ_LEN, 32)

    assert middle(Small(attend))[-1] == ops.AttentionMix(heads=4, queries=SEQ_LEN, keys=SEQ_LEN, head_dim=8)


def test_what_does_not_depend_on_the_tokens_is_free():
    def add_sines(model, x):
        positions = torch.arange(x.shape[1])[:, None] * torch.exp(-torch.arange(32) / 32)
        return x + torch.sin(positions) * model.gain.softmax(0)

    assert middle(Small(add_sines, gain=nn.Parameter(torch.ones(32)))) == [ops.PositionEmbedding(**ROWS)]


def test_all_unsupported_operations_are_listed_with_their_places():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.sort(torch.sin(x) * torch.erf(1.702 * x)).values.cumsum(-1)

    model = Small(lambda model, x: model.layers(x), layers=nn.Sequential(Odd(), Odd()))
    with pytest.raises(ValueError, match=re.escape("model 'mine' has operations on secret values")) as refusal:
        trace(model, SEQ_LEN, name="mine")
    message = str(refusal.value)
    assert "\n" not in message
    for target in ("aten.sin.default", "aten.erf.default", "aten.sort.default", "aten.cumsum.default"):
        assert f"{target} (2x, in layers.0, layers.1)" in message


def test_joined_features_are_not_dropped():
    joined = Small(lambda model, x: model.mix(torch.cat((x, functional.gelu(x)), dim=-1)), mix=nn.Linear(64, 32))
    with pytest.raises(ValueError, match=r"aten\.cat\.default \(1x, in the model itself\)"):
        trace(joined, SEQ_LEN)


def test_a_mask_made_of_tokens_is_not_free():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Small(lambda model, x: x)

        def forward(self, tokens):
            return self.inner(tokens) * (tokens != 0).unsqueeze(-1)

    with pytest.raises(ValueError, match=r"aten\.ne\.Scalar \(1x, in the model itself\)"):
        trace(Padded(), SEQ_LEN)


def test_numbers_written_in_place_are_followed():
    def fill(model, x):
        filled = torch.zeros(1, SEQ_LEN, 32)
        filled[..., :16] = functional.gelu(x[..., :16])
        return filled

    with pytest.raises(ValueError, match="no op stands for"):
        trace(Small(fill), SEQ_LEN)
    doubled = middle(Small(lambda model, x: functional.gelu(x).add_(x)))
    assert [type(op) for op in doubled] == [ops.Gelu, ops.Add]


class TwoInputs(nn.Module):
    def forward(self, tokens, mask):
        return tokens


class Constant(nn.Module):
    def forward(self, tokens):
        return torch.ones(1, tokens.shape[1], 4)


@pytest.mark.parametrize(
    ("make", "seq_len", "message"),
    [
        (gpt2, 0, "`seq_len` must be at least 1, but got 0"),
        (gpt2, 33, "must fit its table of 32 positions, but it has 33 tokens, the last at position 32"),
        (TwoInputs, 8, "but that raised TypeError: .*missing 1 required positional argument: 'mask'"),
        (Constant, 8, "the logits of model 'm' must be computed from its tokens, but they are not"),
        (nn.Identity, 8, "the logits of model 'm' must be computed from its tokens, but they are not"),
    ],
)
def test_models_that_cannot_be_traced(make, seq_len, message):
    with pytest.raises(ValueError, match=message) as refusal:
        trace(make(), seq_len, name="m")
    assert "\n" not in str(refusal.value)


def test_a_model_is_traced_as_it_is_used_and_left_as_it_was():
    model = gpt2().train()
    trace(model, SEQ_LEN)
    assert model.training
    assert not any("dropout" in node.name for node in trace(model, SEQ_LEN))
