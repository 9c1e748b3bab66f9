"""Single linears in the place of a parent's FFNs: those that bring each layer nearest to what the parent's leaves.

By least squares over the stream of the parent, closed form. The two linears without the activation between them are far
from that: of the builtin parent at scale `proxy`, `SM+ScFuFFN` then has a perplexity of 15.8 and 11.9 by least squares,
`1xlSlRo-11xlSlFo` 16.5 and 11.3 (seed 0).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from nas.model.decoder import Decoder, FeedForward

RIDGE = 1e-3  # of the mean square of what a linear reads, which all but leaves out directions that hardly vary
LEAST = 1e-12  # square of what a layer adds, where it adds nothing


@torch.no_grad()
def fitted_linears(parent: Decoder, model: Decoder, layers: Sequence[int], tokens: Tensor) -> Mapping[str, Tensor]:
    """Weights of the fused FFNs of a model, by node, for layers in which all else is as it starts from the parent.

    tokens: sequences x T, what the fit is over.
    """
    streams = streams_of(parent, tokens)
    fitted: dict[str, Tensor] = {}
    for index in layers:
        ffn = model.layers[index].ffn
        assert isinstance(ffn, FeedForward)
        fit_linear(model.layers[index], streams[index], streams[index + 1])
        assert ffn.fused is not None
        fitted |= {f"layers.{index}.ffn.fused.{name}": value.clone() for name, value in ffn.fused.named_parameters()}
    return fitted


@torch.no_grad()
def streams_of(model: Decoder, tokens: Tensor) -> list[Tensor]:
    """Returns what every layer reads of a batch and what the last one leaves, each batch x T x d_model."""
    streams: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        streams.append(inputs[0])

    hooks = [module.register_forward_pre_hook(keep) for module in (*model.layers, model.final_norm)]
    try:
        model.features(tokens, with_entropies=False)
    finally:
        for hook in hooks:
            hook.remove()
    return streams


def weights_by_position(read: Tensor, left: Tensor) -> Tensor:
    """One over the mean square of what a layer adds to the stream, T: the first position's is far larger than others'.

    read, left: what the layer reads and leaves, batch x T x d_model.
    """
    return 1 / (left - read).square().mean(dim=(0, 2)).clamp(min=LEAST)


@torch.no_grad()
def fit_linear(layer: nn.Module, read: Tensor, left: Tensor) -> None:
    """Sets a fused FFN to what brings its layer nearest to `left`, each position in the measure of its own.

    read, left: what the layer reads and is to leave, batch x T x d_model.
    """
    seen: list[tuple[Tensor, Tensor]] = []
    ffn = layer.ffn
    assert isinstance(ffn, FeedForward)
    assert ffn.fused is not None
    hook = ffn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    layer(read, False)
    hook.remove()
    ((source, stream),) = seen
    ones = source.new_ones(*source.shape[:2], int(ffn.fused.bias is not None))
    inputs, wanted = torch.cat([source, ones], dim=2), left - stream
    weight = weights_by_position(read, left).sqrt()[None, :, None]
    rows, targets = ((weight * values).flatten(0, 1).double() for values in (inputs, wanted))
    ridge = RIDGE * rows.square().sum() / rows.shape[1] * torch.eye(rows.shape[1], dtype=rows.dtype)
    solved = torch.linalg.solve(rows.T @ rows + ridge, rows.T @ targets)
    ffn.fused.weight.copy_(solved[: source.shape[2]].T)
    if ffn.fused.bias is not None:
        ffn.fused.bias.copy_(solved[-1])
