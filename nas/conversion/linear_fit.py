"""Fit linears to a parent's outputs: those that replace its FFNs, surround a replaced activation or make queries.

A linear FFN is fitted by least squares over the parent's hidden states: with the builtin parent at scale `proxy`,
`SM+ScFuFFN` then has a perplexity of 11.9 instead of 15.8 for the product of the two linears (seed 0). A polynomial
that replaces an activation is `a x^2 + b x + c` for every channel, with a = 0 in a bilinear FFN (docs/llama.md).

Where eighth powers replace a softmax, a factor on each head's queries is fitted. With one factor for all heads, the
block score of a layer of SmolLM2 is 0.002 to 0.014 nats, with fitted factors 0.0005 to 0.0025.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nas.attention.reference import Attended
from nas.conversion.transfer import gate_of
from nas.model.decoder import Decoder
from nas.model.layers import Block, FeedForward
from nas.recipe.distillation import Part, fitted_degree
from search_spaces.forms import POLYNOMIAL_GATES

RIDGE = 1e-3  # regularisation relative to the mean square of the inputs; nearly ignores directions that hardly vary
POLYNOMIAL_RIDGE = 1e-4  # the same for the few coefficients of a polynomial
LEAST = 1e-12  # replaces a mean square of 0
LENGTHS = tuple(2.0 ** (half / 2) for half in range(-6, 9))  # factors on the initial length of queries


@torch.no_grad()
def fitted_linears(parent: Decoder, model: Decoder, parts: Sequence[Part], tokens: Tensor) -> Mapping[str, Tensor]:
    """Fit parts of a model to the parent's, in place; return the new weights of their nodes by `<node>.<suffix>`.

    parts: fused FFNs, FFNs with polynomials and attention with eighth powers to fit (`fitted_parts`). All else in their
        layers should have the parent's weights. tokens: sequences x T to fit on.
    """
    hidden_states = parent.hidden_states(tokens)
    fitted: dict[str, Tensor] = {}
    for index, kind in parts:
        layer, theirs = model.layers[index], parent.layers[index]
        assert isinstance(layer, Block)
        if kind == "attention":
            fit_queries(layer, theirs, hidden_states[index])
            names = [layer.queries]
        elif layer.ffn is not None and layer.ffn.fused is not None:
            fit_linear(layer, hidden_states[index], hidden_states[index + 1])
            names = ["ffn.fused"]
        else:
            ffn, source = model.architecture.layers[index].ffn, parent.architecture
            degree = fitted_degree(ffn, source.layers[index], source)
            assert degree is not None
            fit_polynomial(layer, theirs, hidden_states[index], hidden_states[index + 1], degree)
            names = ["ffn.gate", "ffn.up"] if ffn in POLYNOMIAL_GATES else ["ffn.up", "ffn.down"]
        for name in names:
            parameters = layer.get_submodule(name).named_parameters()
            fitted |= {f"layers.{index}.{name}.{key}": value.clone() for key, value in parameters}
    return fitted


def weights_by_position(read: Tensor, left: Tensor) -> Tensor:
    """Return a weight for each of T positions: 1 / mean square of what a layer adds to the stream at the position.

    In trained decoders, the first position has the smallest weight. read, left: input and output of the layer,
    batch x T x d_model.
    """
    return 1 / (left - read).square().mean(dim=(0, 2)).clamp(min=LEAST)


@torch.no_grad()
def fit_linear(layer: nn.Module, read: Tensor, left: Tensor) -> None:
    """Fit an FFN that is one linear in place by weighted ridge regression, to bring its layer's output near to `left`.

    read: input of the layer. left: output that it should have. Both are batch x T x d_model. The weights are those of
        `weights_by_position`. A norm after the FFN keeps only the direction of its input; the FFN is then fitted to the
        output that the norm should have, without the gain.
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
    inputs, zero = torch.cat([source, ones], dim=2), torch.zeros_like(stream)
    branch = left - stream if ffn.residual is None else (left - ffn.residual(stream, zero)) * ffn.residual.alpha
    wanted = branch / ffn.scale
    if ffn.norm is not None:
        gain = ffn.norm.get_parameter("weight")  # where it is 0, as in Gemma 3, nothing is known of the norm's input
        wanted = torch.where(gain == 0, 0, wanted / gain)
    weight = weights_by_position(read, left).sqrt()[None, :, None]
    rows, targets = ((weight * values).flatten(0, 1).double() for values in (inputs, wanted))
    ridge = RIDGE * rows.square().sum() / rows.shape[1] * torch.eye(rows.shape[1]).to(rows)
    solved = torch.linalg.solve(rows.T @ rows + ridge, rows.T @ targets)
    ffn.fused.weight.copy_(solved[: source.shape[2]].T)
    if ffn.fused.bias is not None:
        ffn.fused.bias.copy_(solved[-1])


@torch.no_grad()
def fit_polynomial(layer: nn.Module, theirs: nn.Module, read: Tensor, left: Tensor, degree: int) -> None:
    """Fit an FFN with a polynomial activation in place, to bring the input of `down` nearest to the parent's.

    theirs: the parent's layer, with or without a gate. read, left: input of both layers and output of the parent's,
        sequences x T x d_model; one sequence is run at a time. For each channel, the weighted sum of squares of
        h - (a x^2 + b x + c) u is minimised, where x is the input of the parent's activation, u the output of the
        parent's `up` (1 if `layer` has no gate), h the parent's input of `down`, and the weights are square roots of
        `weights_by_position`. The linears around the activation take up the coefficients, as far as `gate_of` can.
        degree: 1 for a = 0, or 2.

    Large inputs are rare, so a fit needs thousands of tokens. Where the numbers at a position are far larger, the fit
    must neither neglect that position nor serve it alone. KL from the parent on other text, in nats, if the activations
    of all layers are replaced and nothing is trained (`mixture/recovery` of `experiments run mixture` in sequences of
    512 tokens; by a script that was not kept):

        tokens of the fit, weights               SmolLM2-135M  Gemma 3 270M
        1,024, none                                     0.288
        4,096, none                                     0.218         0.243
        4,096, `weights_by_position`                    0.927
        4,096, their square roots                       0.143         0.248
        8,192, their square roots                                     0.243
    """
    ours, parents = layer.ffn, theirs.ffn
    assert isinstance(ours, FeedForward)
    assert isinstance(parents, FeedForward)
    linear = parents.up if parents.gate is None else parents.gate
    weight = weights_by_position(read, left).double().sqrt()
    products = weight.new_zeros(())
    for stream in read:
        source, wanted = (values[0] for values in _ffn_inputs(theirs, parents, stream[None]))
        gate, up = linear(source).double(), parents.up(source).double()
        factor = torch.ones_like(up) if ours.gate is None else up
        powers = [gate.pow(power) * factor for power in range(degree + 1)]
        columns = torch.stack([*powers, wanted.double()], dim=-1)  # T x d_ff x (degree + 2)
        products = products + torch.einsum("t,tfi,tfj->fij", weight, columns, columns)
    squares = products.diagonal(dim1=1, dim2=2).clamp(min=LEAST)
    spread = (squares[:, 1] / squares[:, 0]).sqrt()  # a channel's usual |x|, the unit in which `gate_of` has its limits
    scaled = [value * spread**power for power, value in enumerate(_coefficients(products))]
    slope, shift, scale = gate_of(scaled)
    rows, bias, offset = linear.weight.double(), _bias(linear), _bias(parents.down)
    made = ours.up if ours.gate is None else ours.gate
    made.weight.copy_((slope / spread)[:, None] * rows)
    made.bias.copy_(slope / spread * bias + shift)
    if ours.gate is not None:
        for name, value in parents.up.named_parameters():
            ours.up.get_parameter(name).copy_(torch.einsum("f,f...->f...", scale, value.double()))
    else:  # it computes s x^2, but s (x^2 - 1) is wanted
        down = parents.down.weight.double() * scale
        ours.down.weight.copy_(down)
        ours.down.bias.copy_(offset - down.sum(dim=1))


def _ffn_inputs(layer: nn.Module, ffn: FeedForward, stream: Tensor) -> list[Tensor]:
    """Return the inputs of a layer's FFN and of its `down`, each batch x T x width."""
    seen: list[Tensor] = []
    hooks = [part.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for part in (ffn, ffn.down)]
    layer(stream, False)
    for hook in hooks:
        hook.remove()
    return seen


def _bias(linear: nn.Linear) -> Tensor:
    return torch.zeros(()).double() if linear.bias is None else linear.bias.double()


@torch.no_grad()
def fit_queries(layer: Block, theirs: nn.Module, read: Tensor) -> None:
    """Scale each head's queries in place by the factor in LENGTHS that brings its output nearest to the parent's.

    If heads share the gain of a query norm, the factors' geometric mean is used for all. theirs: the parent's layer.
        read: input of both layers, batch x T x d_model.
    """
    (queries, keys, values), temperature = _attended_by(layer, read)
    wanted = _attend(theirs, *_attended_by(theirs, read))
    least, best = queries.new_full((queries.shape[1],), torch.inf), queries.new_ones(queries.shape[1])
    for length in LENGTHS:
        made = _attend(layer, (queries * length, keys, values), temperature)
        error = (made - wanted).square().mean(dim=(0, 2, 3))
        best, least = best.where(least <= error, length), torch.minimum(least, error)
    layer.scale_queries(best)


def _attended_by(layer: nn.Module, read: Tensor) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return queries, keys and values of a layer, each batch x heads x T x head_dim, and its temperature."""
    seen: list[tuple[tuple[Tensor, ...], Tensor | None]] = []
    attention: Any = layer.attention
    attend = attention.attend

    def observed(*heads: Tensor, temperature: Tensor | None, with_entropy: bool) -> Attended:
        seen.append((heads, temperature))
        attended: Attended = attend(*heads, temperature=temperature, with_entropy=with_entropy)
        return attended

    attention.attend = observed
    layer(read, False)
    attention.attend = attend
    return seen[0]


def _attend(layer: nn.Module, heads: tuple[Tensor, ...], temperature: Tensor | None) -> Tensor:
    attention: Any = layer.attention
    output: Tensor = attention.attend(*heads, temperature=temperature, with_entropy=False).output
    return output


def _coefficients(products: Tensor) -> Sequence[Tensor]:
    """Return the ridge-regression coefficients of each column, d_ff each.

    products: sums of products of the columns, of which the last one is fitted; d_ff x columns x columns, float64.
    """
    squares, wanted = products[:, :-1, :-1], products[:, :-1, -1]
    size = squares.diagonal(dim1=1, dim2=2).clamp(min=LEAST).sqrt()
    squares = squares / (size[:, :, None] * size[:, None]) + POLYNOMIAL_RIDGE * torch.eye(size.shape[1]).to(squares)
    solved: Tensor = torch.linalg.solve(squares, wanted / size) / size
    return tuple(solved.unbind(dim=-1))
