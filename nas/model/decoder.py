"""The decoder for training: `nas.model.layers.PlainDecoder` with entropies, fast attention and recomputed layers."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from costmodel.errors import UserError
from nas.attention.causal import causal_attention
from nas.attention.reference import capped
from nas.model.bf16_products import wide_linear
from nas.model.fused_forms import fused_normalised_attention
from nas.model.layers import Block, FeedForward, LeakyRelu, PlainDecoder
from nas.model.mpc_friendly import query_scale
from nas.model.norms import FrozenNorm
from nas.model.self_attention import Parts, ShapedSelfAttention
from nas.model.settings import settings_of
from nas.recipe.recipe import SlopeSharing
from search_spaces.architecture import Architecture, num_heads, softmax_form

INIT_STD = 0.02  # Radford et al. 2019, GPT-2, at its smallest width
INIT_WIDTH = 768
MAX_TABLE_STD = 0.16  # from the rule at width 96; in narrower models, larger tables would predict their own tokens
LOGITS_AT_A_TIME = 1 << 26  # of one product, 256 MiB; every product reads the whole output table
COMPARED_AT_A_TIME = 1 << 22  # logits, 16 MiB: larger tensors, freed and allocated again, take five times as long

# Calls a layer with the residual stream and whether entropies are wanted, the arguments of `Block.forward`.
LayerFunction: TypeAlias = Callable[[nn.Module, Tensor, bool], Any]


class Prediction(NamedTuple):
    """Logits, batch x T x vocab, and each layer's attention entropies in nats, batch x heads x T; None if not wanted.

    There is one entropy per query. A layer without attention has 0 heads.
    """

    logits: Tensor
    entropies: tuple[Tensor, ...] | None


class TrainedTemperature(nn.Module):
    """Temperatures t[h, i] > 0 that divide row i of head h of the scores; ln t is trained."""

    def __init__(self, num_heads: int, context: int) -> None:
        super().__init__()
        self.log_weight = nn.Parameter(torch.zeros(num_heads, context))

    def forward(self, first: int, last: int) -> Tensor:
        """Return the temperatures of positions `first` to `last` - 1, heads x positions."""
        return self.log_weight[:, first:last].exp()


TRAINED = Parts(causal_attention, fused_normalised_attention, FrozenNorm, TrainedTemperature)


class Decoder(PlainDecoder):
    """A decoder-only language model to train. Raises UserError if rotary positions do not fit its heads."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__(**settings_of(architecture), parts=TRAINED)
        self.architecture = architecture
        self.recompute = False  # whether the backward pass computes layers again instead of storing activations
        self.layer_function: LayerFunction = nn.Module.__call__  # calls layers in training; may be compiled

    def forward(self, tokens: Tensor, *, with_entropies: bool = True) -> Prediction:
        """Return the logits of tokens (batch x T, int64) and, if wanted, the attention entropies; see `Prediction`.

        Attention may be faster without entropies. Raises UserError if T is above the architecture's context.
        """
        stream, entropies = self.features(tokens, with_entropies=with_entropies)
        return Prediction(self.logits_of(stream), entropies)

    def logits_of(self, features: Tensor) -> Tensor:
        """Return the logits, batch x T x vocab, for the first result of `features`."""
        if torch.is_autocast_enabled(features.device.type) and not torch.is_grad_enabled():
            return capped(wide_linear(features, self.logits.weight), self.logit_cap)
        return super().logits_of(features)

    def logits_in_parts(self, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of rows and their logits, rows x vocab, few at a time. features: as for `logits_of`."""
        features, size = features.flatten(0, -2), self.architecture.vocab_size
        at_once, compared = (max(1, logits // size) for logits in (LOGITS_AT_A_TIME, COMPARED_AT_A_TIME))
        for start in range(0, len(features), at_once):
            for offset, logits in enumerate(torch.split(self.logits_of(features[start : start + at_once]), compared)):
                first = start + offset * compared
                yield slice(first, first + len(logits)), logits

    def features(
        self, tokens: Tensor, *, with_entropies: bool, hidden_states: list[Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Return the input of the vocabulary projection, batch x T x d_model, and the entropies of `Prediction`.

        Arguments and errors are those of `forward`. hidden_states: a list to which the input of each layer and the
            output of the last are appended.
        """
        stream = self.embedded(tokens)  # batch x T x d_model
        passed, entropies = [stream], []
        for layer in self.layers:
            if not torch.is_grad_enabled():
                stream, entropy = layer(stream, with_entropies)
            elif self.recompute:
                stream, entropy = _recomputed(layer, stream, with_entropies)
            else:
                stream, entropy = self.layer_function(layer, stream, with_entropies)
            entropies.append(entropy)  # batch x heads x T
            passed.append(stream)
        if hidden_states is not None:
            hidden_states += passed
        return self.read_out(stream), tuple(entropies) if with_entropies else None

    def hidden_states(self, tokens: Tensor) -> list[Tensor]:
        """Return the input of every layer and the output of the last, each batch x T x d_model."""
        hidden_states: list[Tensor] = []
        self.features(tokens, with_entropies=False, hidden_states=hidden_states)
        return hidden_states


def log_probabilities(*models: Decoder, tokens: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield a slice of the positions of all tokens and each model's log-probabilities there, positions x vocab, fp32.

    tokens: batch x T, whose positions are numbered sequence by sequence. The models must have the same vocab_size.
    """
    features = [model.features(tokens, with_entropies=False)[0] for model in models]
    parts = (model.logits_in_parts(each) for model, each in zip(models, features, strict=True))
    for made in zip(*parts, strict=True):
        yield made[0][0], [logits.float().log_softmax(dim=-1) for _, logits in made]


def _recomputed(layer: nn.Module, stream: Tensor, with_entropy: bool) -> Any:
    """Run a layer that stores only its input for the backward pass."""
    return checkpoint(
        layer, stream, with_entropy, use_reentrant=False, context_fn=lambda: (nullcontext(), _observed(layer))
    )


@contextmanager
def _observed(layer: nn.Module) -> Iterator[None]:
    """Keep a layer in evaluation mode during the body: its norms have recorded this stream's deviations already."""
    was_training = layer.training
    layer.eval()
    try:
        yield
    finally:
        layer.train(was_training)


def build(
    architecture: Architecture,
    generator: torch.Generator,
    *,
    temperature_init: float = 1.0,
    slopes: SlopeSharing = "layer",
) -> Decoder:
    """Return a decoder with weights drawn from `generator`: N(0, s) for linears, 0 for biases, 1 for gains of norms.

    The standard deviation s is GPT-2's 0.02 at width 768 and proportional to 1 / sqrt(width). Linears that write to the
    stream have s / sqrt(2 x layers), and queries of eighth powers are multiplied by `query_scale`. The standard
    deviation of embedding tables is proportional to 1 / width, up to 0.16, which brings the ranking of architectures at
    width 96 nearer to the papers'. In a shaped block, queries start at 0, layer 0's values at the identity plus
    N(0, s), and the last linear of an FFN at N(0, s), times 0.1 if no learned scale follows it.

    temperature_init: initial value of learned softmax temperatures. slopes: with `global`, all leaky ReLUs share one
        learned slope.

    Raises UserError as `Decoder` does, and for a shaped block with ReLU instead of softmax, which has no gradient at
    queries of 0.
    """
    forms = {softmax_form(architecture, layer) for layer in architecture.layers}
    if architecture.block_facts.is_shaped and "relu" in forms:
        raise UserError(
            f"block {architecture.block!r} starts from queries of 0, where softmax 'relu' has no gradient; choose "
            "softmax 'exact' or '2quad'."
        )
    model = Decoder(architecture)
    std = INIT_STD * math.sqrt(INIT_WIDTH / architecture.d_model)
    draw = partial(nn.init.normal_, generator=generator)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            draw(module.weight, std=min(INIT_STD * INIT_WIDTH / architecture.d_model, MAX_TABLE_STD))
        elif isinstance(module, TrainedTemperature):
            nn.init.constant_(module.log_weight, math.log(temperature_init))
        elif isinstance(module, nn.Linear) and name != "logits":
            writes_to_stream = name.endswith((".out", ".down", ".fused"))
            draw(module.weight, std=std / math.sqrt(2 * architecture.num_layers) if writes_to_stream else std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for layer, made in zip(architecture.layers, model.layers, strict=True):
        assert isinstance(made, Block)
        if (scale := query_scale(softmax_form(architecture, layer))) != 1 and made.attention is not None:
            made.scale_queries(torch.full((num_heads(architecture, layer),), scale))
    if not architecture.tied_embeddings:
        draw(model.logits.weight, std=std)
    if architecture.block_facts.is_shaped:
        _start_shaped(model)
    if slopes == "global":
        activations = [module for module in model.modules() if isinstance(module, LeakyRelu)]
        for activation in activations:
            activation.slope = activations[0].slope
    return model


@torch.no_grad()
def _start_shaped(model: Decoder) -> None:
    """Initialise shaped blocks to pass the stream on, so that they need no skips or norms. Source: arXiv 2311.01906."""
    for module in model.modules():
        if isinstance(module, ShapedSelfAttention):
            queries, _ = module.qk.weight.chunk(2)
            queries.zero_()
            if isinstance(module.v, nn.Linear):
                module.v.weight += torch.eye(*module.v.weight.shape)
        elif isinstance(module, FeedForward):
            last = module.down if module.fused is None else module.fused
            last.weight *= math.sqrt(2 * model.architecture.num_layers)
            last.weight *= model.architecture.block_facts.branch_gain if module.residual is None else 1.0
