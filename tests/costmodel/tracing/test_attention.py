"""Attention spelled out in torch: factors, caps and masks."""

import math
from operator import mul, truediv
from typing import Any

import pytest
import torch
from torch import nn

from costmodel import ops
from costmodel.tracing.trace import trace

SEQ_LEN, VOCAB, HEADS, HEAD_DIM = 9, 40, 4, 8
SQUARE: Any = {"heads": HEADS, "queries": SEQ_LEN, "keys": SEQ_LEN}
SCORES: Any = {"rows": HEADS * SEQ_LEN, "features": SEQ_LEN}
LOWER = torch.ones(SEQ_LEN, SEQ_LEN).tril()


class Attention(nn.Module):
    """score: from queries and keys, heads x T x head_dim, to scores, heads x T x T."""

    def __init__(self, score):
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB, bias=False)
        self.linears = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.score = score

    def forward(self, tokens):
        x = self.table(tokens)
        queries, keys, values = (linear(x).view(SEQ_LEN, HEADS, 8).transpose(0, 1) for linear in self.linears)
        weights = self.score(queries, keys).softmax(-1)
        return self.head(torch.matmul(weights, values).transpose(0, 1).reshape(1, SEQ_LEN, 32))


def between(score):
    """The ops from scores to softmax."""
    return [node.op for node in trace(Attention(score), SEQ_LEN)][5:-2]


def product(queries, keys):
    return queries @ keys.transpose(1, 2)


def causal(scores):
    return scores.masked_fill(LOWER == 0, -math.inf)


def scored(factor, *, causal=True):
    return ops.AttentionScores(**SQUARE, head_dim=HEAD_DIM, scaled=factor is not None, factor=factor, causal=causal)


MASKS = {
    "none": (lambda scores: scores, False),
    "shows all": (lambda scores: scores + torch.zeros(SEQ_LEN, SEQ_LEN), False),
    "added": (lambda scores: scores + torch.full((SEQ_LEN, SEQ_LEN), -math.inf).triu(1), True),
    "filled": (causal, True),
    "filled nowhere": (lambda scores: scores.masked_fill(LOWER < 0, -math.inf), False),
    "chosen": (lambda scores: torch.where(LOWER == 1, scores, torch.finfo(scores.dtype).min), True),
    "put in": (lambda scores: torch.where(LOWER == 0, -1e9, scores), True),
    "zeroed and added": (lambda scores: scores * LOWER + -1e4 * (1 - LOWER), True),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_cost_nothing_and_say_whether_attention_is_causal(name):
    mask, is_causal = MASKS[name]
    assert between(lambda q, k: mask(product(q, k))) == [
        scored(None, causal=is_causal),
        ops.Softmax(**SQUARE, causal=is_causal),
    ]


@pytest.mark.parametrize(
    "mask",
    [
        lambda scores: scores.masked_fill(LOWER == 0, 0.0),
        lambda scores: scores * LOWER,
        lambda scores: scores * (LOWER + 1) + -1e4 * (1 - LOWER),
    ],
)
def test_scores_that_are_changed_and_not_hidden_are_refused(mask):
    with pytest.raises(ValueError, match="no op stands for: "):
        trace(Attention(lambda q, k: mask(product(q, k))), SEQ_LEN)


def scale(factor):
    return ops.Scale(**SCORES, factor=factor)


CHAINS = {
    "of queries": (lambda q, k: product(q * 0.3, k), [scored(0.3)]),
    "of queries and keys": (lambda q, k: product(q * 0.5, k / 4), [scored(0.125)]),
    "that cancel": (lambda q, k: product(q * 4, k / 4), [scored(None)]),
    "of scores": (lambda q, k: product(q, k) / 5, [scored(0.2)]),
    "of all": (lambda q, k: product(q * 0.3, k) / 5, [scored(0.3), scale(0.2)]),
    "twice": (lambda q, k: product(q, k) * 0.3 / 5, [scored(0.3), scale(0.2)]),
    "that is a root": (lambda q, k: product(q, k) / HEAD_DIM**0.5, [ops.AttentionScores(**SQUARE, head_dim=HEAD_DIM)]),
    "around a cap": (
        lambda q, k: torch.tanh(product(q, k) * 0.3 / 50) * 50,
        [scored(0.3), scale(0.02), ops.Tanh(**SCORES), scale(50.0)],
    ),
    "after a cap": (lambda q, k: torch.tanh(product(q, k)) * 50, [scored(None), ops.Tanh(**SCORES), scale(50.0)]),
    "of a kernel": (
        lambda q, k: torch.baddbmm(torch.zeros(1, SEQ_LEN, SEQ_LEN), q, k.transpose(1, 2), alpha=0.3),
        [scored(0.3)],
    ),
}


@pytest.mark.parametrize(
    ("size", "apply"), [((), mul), ((1,), mul), ((HEADS, 1, 1), mul), ((HEADS, SEQ_LEN, 1), truediv)]
)
def test_a_learned_factor_is_a_temperature_whatever_its_value(size, apply):
    model: Any = Attention(lambda q, k: causal(apply(product(q, k), model.learned)))
    model.learned = nn.Parameter(torch.ones(size))
    assert [node.op for node in trace(model, SEQ_LEN)][5:-2] == [
        scored(None),
        ops.Temperature(**SQUARE),
        ops.Softmax(**SQUARE),
    ]


@pytest.mark.parametrize("name", CHAINS)
def test_factors_and_caps(name):
    score, chain = CHAINS[name]
    assert between(lambda q, k: causal(score(q, k)))[:-1] == chain
