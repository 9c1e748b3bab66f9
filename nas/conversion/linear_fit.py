"""Linears in the place of a parent's FFNs, or of activations in them: those nearest to what the parent's compute.

By least squares over the stream of the parent, closed form. The two linears without the activation between them are far
from that: of the builtin parent at scale `proxy`, `SM+ScFuFFN` then has a perplexity of 15.8 and 11.9 by least squares,
`1xlSlRo-11xlSlFo` 16.5 and 11.3 (seed 0).

In the gate of a bilinear FFN an activation becomes `a x + c` for every channel, nearest to the product that the parent
computes, over the same stream.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from nas.model.decoder import Decoder, FeedForward

RIDGE = 1e-3  # of the mean square of what a linear reads, which all but leaves out directions that hardly vary
LEAST = 1e-12  # square of what a layer adds, where it adds nothing


@torch.no_grad()
def fitted_linears(parent: Decoder, model: Decoder, layers: Sequence[int], tokens: Tensor) -> Mapping[str, Tensor]:
    """Weights of fused FFNs and bilinear gates, by node, for layers in which all else is as it starts from the parent.

    tokens: sequences x T, what the fit is over.
    """
    streams = parent.streams(tokens)
    fitted: dict[str, Tensor] = {}
    for index in layers:
        ffn = model.layers[index].ffn
        assert isinstance(ffn, FeedForward)
        if ffn.fused is not None:
            fit_linear(model.layers[index], streams[index], streams[index + 1])
        else:
            fit_gate(model.layers[index], parent.layers[index], streams[index])
        name, linear = ("gate", ffn.gate) if ffn.fused is None else ("fused", ffn.fused)
        assert linear is not None
        fitted |= {f"layers.{index}.ffn.{name}.{key}": value.clone() for key, value in linear.named_parameters()}
    return fitted


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
    ridge = RIDGE * rows.square().sum() / rows.shape[1] * torch.eye(rows.shape[1]).to(rows)
    solved = torch.linalg.solve(rows.T @ rows + ridge, rows.T @ targets)
    ffn.fused.weight.copy_(solved[: source.shape[2]].T)
    if ffn.fused.bias is not None:
        ffn.fused.bias.copy_(solved[-1])


@torch.no_grad()
def fit_gate(layer: nn.Module, theirs: nn.Module, read: Tensor) -> None:
    """Sets the gate of a bilinear FFN to what brings its products nearest to what the parent's `down` reads.

    theirs: the parent's layer, with a gate or without; read: what both read, batch x T x d_model. For each channel, of
    the gate's x (without a gate that of `up`), the product's other factor u and what the parent has there, h:
    least squares of h - (a x + c) u. The weights of a parent's gate take up a and c.
    """
    seen: list[Tensor] = []
    ours, parents = layer.ffn, theirs.ffn
    assert isinstance(ours, FeedForward)
    assert isinstance(parents, FeedForward)
    assert ours.gate is not None
    hooks = [
        part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for part in (parents, parents.down)
    ]
    theirs(read, False)
    for hook in hooks:
        hook.remove()
    source, hidden = seen
    linear = parents.up if parents.gate is None else parents.gate
    factor, gate = (part(source).flatten(0, 1).double() for part in (parents.up, linear))
    columns = torch.stack((gate * factor, factor), dim=-1)  # rows x d_ff x 2
    squares = torch.einsum("rfi,rfj->fij", columns, columns)
    ridge = RIDGE * squares.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=LEAST)
    products = torch.einsum("rfi,rf->fi", columns, hidden.flatten(0, 1).double())
    slope, shift = torch.linalg.solve(squares + torch.diag_embed(ridge[:, None].expand(-1, 2)), products).unbind(dim=-1)
    bias = torch.zeros(()) if linear.bias is None else linear.bias
    ours.gate.weight.copy_(slope[:, None] * linear.weight.double())
    ours.gate.bias.copy_(slope * bias.double() + shift)
