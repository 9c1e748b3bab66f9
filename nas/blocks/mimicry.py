"""Trains alternatives of half layers alone, each to do what the parent's layer does, on the parent's own stream.

One pass over the data for all: the parent runs once a batch, and every alternative is moved towards what the parent's
layer makes of the same stream. Alternatives do not see one another, so their number and order do not matter.

Source: Bercovich et al. 2024, "Puzzle", arXiv 2411.19146, section 3: a library of blocks trained apart.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nas.blocks.halves import Half
from nas.conversion.linear_fit import fit_linear, streams_of, weights_by_position
from nas.conversion.parent import Parent
from nas.conversion.transfer import transferred
from nas.corpus.corpus import Corpus
from nas.model.decoder import Decoder
from nas.model.norms import followed_deviations, frozen_norms
from nas.model.weights import load_deployed
from nas.training.batches import train_batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Mimicry:
    """How alternatives are trained: by AdamW at a constant rate; norms freeze after their share of the steps."""

    tokens: int = 32_768
    batch: int = 8
    learning_rate: float = 1e-3
    freezing_share: float = 0.25


class Alternative:
    """One form of a half layer in every layer that it is asked for in, and its training."""

    def __init__(self, parent: Parent, halves: list[Half], learning_rate: float) -> None:
        own = parent.model.architecture
        layers = list(own.layers)
        for half in halves:
            norm, form = ("norm1", "attention") if half.part == "attention" else ("norm2", "ffn")
            layers[half.depth] = replace(layers[half.depth], **{norm: half.norm, form: half.form})  # type: ignore[arg-type]
        target = replace(own, layers=tuple(layers))
        self.halves = halves
        self.model = Decoder(target)
        load_deployed(self.model, transferred(own, parent.model.weights, target))
        self.model.requires_grad_(False)
        moved = [one for half in halves for one in _own_parameters(self.model, half)]
        for one in moved:
            one.requires_grad_()
        self.optimizer = torch.optim.AdamW(moved, lr=learning_rate, weight_decay=0.0) if moved else None

    def start(self, streams: list[Tensor]) -> None:
        """Starts single linears in place of FFNs at the least squares of a batch; what others start as is theirs."""
        for half in self.halves:
            layer = self.model.layers[half.depth]
            if half.form == "fused":
                fit_linear(layer, streams[half.depth], streams[half.depth + 1])

    def step(self, streams: list[Tensor]) -> None:
        """streams: what every layer of the parent reads, and what the last one leaves, each batch x T x d_model."""
        if self.optimizer is None:
            return
        errors = [
            mimicry_error(self.model.layers[half.depth](streams[half.depth], False)[0], *streams[half.depth :][:2])
            for half in self.halves
        ]
        self.optimizer.zero_grad()
        torch.autograd.backward(torch.stack(errors).sum())
        self.optimizer.step()
        followed_deviations(self.model)

    def freeze_norms(self) -> None:
        for norm in frozen_norms(self.model).values():
            if not norm.is_frozen:
                norm.set_frozen()


def trained_alternatives(
    parent: Parent, wanted: Iterable[Half], corpus: Corpus, settings: Mimicry, on_step: Callable[[float], None]
) -> list[Alternative]:
    """Every form that is wanted, trained in the layers it is wanted in. on_step: told the share of the steps done."""
    by_form: dict[tuple[str, str, str], list[Half]] = {}
    for half in wanted:
        by_form.setdefault((half.part, half.norm, half.form), []).append(half)
    alternatives = [Alternative(parent, halves, settings.learning_rate) for halves in by_form.values()]
    model, seq_len = parent.decoder(), parent.model.architecture.context
    num_steps = max(1, settings.tokens // (settings.batch * seq_len))
    for step in range(num_steps):
        inputs, _ = train_batch(corpus, step=step, batch=settings.batch, seq_len=seq_len, seed=0)
        streams = streams_of(model, inputs)
        for alternative in alternatives:
            if step >= settings.freezing_share * num_steps:
                alternative.freeze_norms()
            if step == 0:
                alternative.start(streams)
            alternative.step(streams)
        on_step((step + 1) / num_steps)
    return alternatives


def mimicry_error(made: Tensor, read: Tensor, left: Tensor) -> Tensor:
    """Squared error of what a layer leaves over the square of what the parent's adds, at each position on the mean.

    made, read, left: batch x T x d_model. Positions count alike, since the first one's numbers are far larger.
    """
    return ((made - left).square().mean(dim=(0, 2)) * weights_by_position(read, left)).mean()


def _own_parameters(model: Decoder, half: Half) -> list[nn.Parameter]:
    layer = model.layers[half.depth]
    modules = (layer.norm1, layer.attention) if half.part == "attention" else (layer.norm2, layer.ffn)
    return [one for module in modules if isinstance(module, nn.Module) for one in module.parameters()]
