"""What cannot be traced says so in one line: subject, rule, value, remedy, and the module."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from costmodel.errors import UserError
from costmodel.tracing.trace import trace
from tests.costmodel.tracing.models import NO_SPECIAL, SEQ_LEN, SIZE, VOCAB, transformers


def mixtral():
    config = transformers.MixtralConfig(**SIZE, **NO_SPECIAL, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def mamba():
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4, **NO_SPECIAL)
    return transformers.MambaForCausalLM(config)


def t5():
    config = transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config)


def bart():
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


class Needs(nn.Module):
    def forward(self, tokens):
        return self.missing(tokens)


class Halves(nn.Module):
    def forward(self, hidden):
        return torch.div(hidden, 2, rounding_mode="floor")


EXPERTS = (
    "model 'm' has operations on secret values that no op stands for: aten.topk.default (2x, in "
    "model.layers.0.mlp.gate, model.layers.1.mlp.gate); it chooses experts by secret scores; "
    "trace a model of the same shape without experts."
)
STATES = (
    "model 'm' has operations on secret values that no op stands for: aten.conv1d.default (2x, in "
    "backbone.layers.0.mixer, backbone.layers.1.mixer); it convolves over tokens, as state-space layers do; trace a "
    "model with attention in their place."
)
STACKS = (
    "model 'm' must read its tokens with one stack of layers, but {} has an encoder and a decoder (modules {}); let "
    "the factory return one of them with its embedding."
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mixtral, EXPERTS),
        (mamba, STATES),
        (t5, STACKS.format("T5ForConditionalGeneration", "encoder, decoder")),
        (bart, STACKS.format("BartForConditionalGeneration", "model.encoder, model.decoder")),
        (
            lambda: nn.Sequential(nn.Embedding(VOCAB, 32), Halves()),
            "model 'm' has operations on secret values that no op stands for: aten.div.Tensor_mode (1x, in 1); spell "
            "the modules out in known ops, or add ops for them as CONTRIBUTING.md says.",
        ),
        (
            lambda: "gpt2",
            "'m' must be an Architecture or a torch.nn.Module, but is str; let the factory return the model itself.",
        ),
        (
            lambda: nn.Sequential(nn.Embedding(VOCAB, 32), Needs()),
            "model 'm' must take a 1 x 9 tensor of token ids and be exportable by torch.export, but that raised "
            "AttributeError: 'Needs' object has no attribute 'missing' (in module 1)",
        ),
    ],
)
def test_models_that_are_refused(make, message):
    with pytest.raises(UserError) as refusal:
        trace(make(), SEQ_LEN, name="m")
    assert str(refusal.value) == message


PRINTED = """
from torch import nn
from costmodel.tracing.trace import trace

class Branches(nn.Module):
    def forward(self, hidden):
        return hidden if hidden.sum() > 0 else -hidden

try:
    trace(nn.Sequential(nn.Embedding(8, 8), Branches()), 4, name="m")
except ValueError as error:
    print(error)
"""


def test_nothing_but_the_refusal_is_printed():
    done = subprocess.run([sys.executable, "-c", PRINTED], capture_output=True, text=True, check=True)
    assert "be exportable by torch.export, but that raised GuardOnDataDependentSymNode" in done.stdout
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""
