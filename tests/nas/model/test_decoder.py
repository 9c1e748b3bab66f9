"""How a model starts, and what it is made of; `test_op_graph` compares it with its op graph."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nas.attention.causal import attention_reference
from nas.model.decoder import Decoder, build
from nas.model.weights import deployed_weights
from search_spaces.architecture import Architecture, Layer
from search_spaces.bases import BASES
from search_spaces.notation import parse
from tests.small_models import GPT2, PYTHIA


def seeded(architecture: Architecture, seed: int = 0) -> Decoder:
    return build(architecture, torch.Generator().manual_seed(seed), temperature_init=0.5)


def test_gpt2_small_has_gpt2s_parameters() -> None:
    # Radford et al. 2019's released small model: 124,439,808 with 50,257 tokens and 1,024 positions.
    architecture = replace(BASES["gpt2-small"], vocab_size=50_257)
    with torch.device("meta"):
        model = Decoder(architecture)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808


def test_entropies_are_those_of_every_layer_and_head(some_tokens: Callable[..., Tensor]) -> None:
    architecture = parse("SM", GPT2).architecture
    model = seeded(architecture)
    tokens = some_tokens(architecture.vocab_size, length=16)
    entropies = model(tokens).entropies
    assert [layer.shape for layer in entropies] == [(2, 2, 16)] * 2  # batch x heads x T
    stream = model.embed(tokens) + model.position.weight[:16]
    queries, keys, values = model.layers[0].attention.qkv(stream).view(2, 16, 3, 2, 8).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(entropies[0], attention_reference(queries, keys, values).entropy, rtol=1e-4, atol=1e-5)


def test_a_fresh_simplified_block_passes_the_stream_on() -> None:
    model = seeded(parse("HH(SM+ScFuFFN)", GPT2).architecture)
    stream = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(2))
    attended, entropy = model.layers[1].attention(stream)
    torch.testing.assert_close(attended, stream)  # I + softmax - C with queries of 0
    torch.testing.assert_close(entropy, torch.arange(1, 10).log().expand(2, 2, 9))
    assert model.layers[1].ffn.residual.alpha.item() == pytest.approx(10)


def test_every_parameter_of_the_simplified_block_learns(some_tokens: Callable[..., Tensor]) -> None:
    model = seeded(parse("HH(SM(t)+ScFFN)", GPT2).architecture)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # keys and temperatures have no gradient before the queries have left 0
        optimizer.zero_grad()
        functional.cross_entropy(
            model(some_tokens(GPT2.vocab_size, length=16)).logits.flatten(0, 1),
            some_tokens(GPT2.vocab_size, length=16).flatten(),
        ).backward()
        optimizer.step()
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]


def test_one_slope_for_all_layers_is_learned_once() -> None:
    architecture = parse("SM+LR", GPT2).architecture
    model = build(architecture, torch.Generator().manual_seed(0), slopes="global")
    assert sum(name.endswith("slope") for name, _ in model.named_parameters()) == 1
    with torch.no_grad():
        model.layers[1].ffn.activation.slope.fill_(0.5)
    weights = deployed_weights(model)
    assert [weights[f"layers.{index}.ffn.activation.slope"].item() for index in (0, 1)] == [0.5, 0.5]


def test_rotary_over_an_odd_number_of_features_is_refused() -> None:
    odd = replace(PYTHIA, num_heads=2, d_model=24, layers=(Layer(),))  # head_dim 12, a quarter of which is 3
    with pytest.raises(ValueError, match="must be even"):
        Decoder(odd)
