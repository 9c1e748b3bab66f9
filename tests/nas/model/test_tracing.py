"""Tracing our own torch model gives the graph that `lower` states, so the price and the logits."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from costmodel.execution.interpreter import execute
from costmodel.tracing.trace import trace
from nas.attention import causal
from nas.model.decoder import Decoder
from nas.model.weights import deployed_weights
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse

GPT2 = base_architecture("tiny", Dimensions(vocab=40))
PYTHIA = base_architecture("pythia-70m", Dimensions(layers=2, heads=2, d_model=32, vocab=40))
NAMES = ("SM+LN+G", "SM+LN+R", "SM", "SM(t)+LN+LR", "SM+ScFFN", "SM+ScFuFFN_i1", "1xLHoRo-1xooLGo", "SM+RMS+SQ")
SEQ_LEN = 9


def parts(graph):
    """How often each op is in each layer."""
    return Counter((node.layer, node.op) for node in graph)


@pytest.mark.parametrize(("base", "name"), [*product((GPT2, PYTHIA), NAMES), (GPT2, "HH(SM(t)+ScFFN)")])
def test_tracing_our_model_gives_what_lower_states(base, name):
    architecture = parse(name, base).architecture
    model = Decoder(architecture, temperature_init=0.5)
    traced, lowered = trace(model, SEQ_LEN), lower(architecture, SEQ_LEN)
    assert parts(traced) == parts(lowered)
    weights = {name: value.numpy() for name, value in deployed_weights(model).items()}
    tokens = np.random.default_rng(0).integers(architecture.vocab_size, size=SEQ_LEN)
    np.testing.assert_array_equal(execute(traced, weights, tokens), execute(lowered, weights, tokens))


def test_a_prompt_beyond_the_context_is_refused():
    model = Decoder(parse("SM", GPT2).architecture)
    with pytest.raises(ValueError, match="raised UserError: a sequence must not be longer than the model's context"):
        trace(model, GPT2.context + 1)


class WithEntropies(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = Decoder(parse("SM", PYTHIA).architecture)

    def forward(self, tokens):
        return self.decoder(tokens)


def test_entropies_are_no_part_of_the_price():
    assert parts(trace(WithEntropies(), SEQ_LEN)) == parts(lower(parse("SM", PYTHIA).architecture, SEQ_LEN))


class Filling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, keys, values):
        output = torch.empty_like(queries)
        for row in range(queries.shape[-2]):
            scores = queries[..., row : row + 1, :] @ keys[..., : row + 1, :].mT
            torch.matmul(scores.softmax(dim=-1), values[..., : row + 1, :], out=output[..., row : row + 1, :])
        return output


def test_attention_that_fills_buffers_is_refused_and_not_dropped(monkeypatch):
    monkeypatch.setattr(causal, "_flash", lambda *parts: (Filling.apply(*parts), parts[0].sum(dim=-1)))
    with pytest.raises(
        ValueError, match="no op stands for: .* in decoder.layers.0.attention, decoder.layers.1.attention"
    ):
        trace(WithEntropies(), SEQ_LEN)
