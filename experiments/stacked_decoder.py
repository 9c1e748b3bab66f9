"""Decoders of one size with placements of their own as one batched program.

A parameter that several members have becomes one tensor, members x its shape, and from then on a member's own parameter
is a slice of it. What a member lacks, a norm or an FFN, is computed for the others only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from nas.attention.causal import causal_attention, scale_by_temperature
from nas.model.decoder import ACTIVATIONS
from search_spaces.architecture import Architecture, Ffn

NORM_EPS = 1e-5  # of nn.LayerNorm


class StackedPrediction(NamedTuple):
    """logits: members x batch x T x vocab. entropies: members x layers x batch x heads x T, of the first members."""

    logits: Tensor
    entropies: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberRows:
    """Some members of `total`; `index` holds their places in order, or is None if they are all."""

    total: int
    places: tuple[int, ...]
    index: Tensor | None

    def of(self, tensor: Tensor) -> Tensor:
        """Their share of a tensor that begins with all members."""
        return tensor if self.index is None else tensor.index_select(0, self.index)

    def put(self, tensor: Tensor, share: Tensor) -> Tensor:
        """The tensor with their share replaced."""
        return share if self.index is None else tensor.index_copy(0, self.index, share)

    def add(self, tensor: Tensor, share: Tensor) -> Tensor:
        """The tensor with something added to their share."""
        return tensor + share if self.index is None else tensor.index_add(0, self.index, share)


@dataclass(frozen=True, kw_only=True, slots=True)
class Joint:
    """One parameter of some members. value: members x its shape; parts: the members' own, in the same memory."""

    name: str
    rows: MemberRows
    value: nn.Parameter
    parts: tuple[nn.Parameter, ...]


class Joints:
    """The parameters of modules with common names, joined on demand."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._named = [dict(module.named_parameters()) for module in modules]
        self.device = next(modules[0].parameters()).device
        self.all: list[Joint] = []

    def rows(self, places: Sequence[int]) -> MemberRows:
        """The members at these places."""
        total = len(self._named)
        index = None if len(places) == total else torch.tensor(places, device=self.device)
        return MemberRows(total=total, places=tuple(places), index=index)

    def owners(self, name: str) -> MemberRows:
        """The members that have such a parameter."""
        return self.rows([place for place, named in enumerate(self._named) if name in named])

    def join(self, name: str, rows: MemberRows | None = None) -> nn.Parameter | None:
        """The parameter of these members, by default of all its owners; None if there are none. Keeps gradients."""
        rows = self.owners(name) if rows is None else rows
        parts = tuple(self._named[place][name] for place in rows.places if name in self._named[place])
        if not parts:
            return None
        value = nn.Parameter(torch.stack([part.detach() for part in parts]))
        value.grad = torch.stack([torch.zeros_like(part) if part.grad is None else part.grad for part in parts])
        for part, piece, gradient in zip(parts, value.detach(), value.grad, strict=True):
            part.data, part.grad = piece, gradient
        self.all.append(Joint(name=name, rows=rows, value=value, parts=parts))
        return value


class StackedDecoder:
    """The forward pass of all members at once; `joints` is asked for the weights of module `prefix` of each."""

    def __init__(self, architectures: Sequence[Architecture], joints: Joints, prefix: str) -> None:
        shape = architectures[0]
        self.embed = _present(joints.join(f"{prefix}embed.weight"))
        self.position = _present(joints.join(f"{prefix}position.weight"))
        self.layers = [
            _StackedBlock(architectures, index, joints, f"{prefix}layers.{index}.") for index in range(shape.num_layers)
        ]
        self.final_norm = _LayerNorms(joints, f"{prefix}final_norm")
        self.logits = self.embed if shape.tied_embeddings else _present(joints.join(f"{prefix}logits.weight"))

    def __call__(self, tokens: Tensor, *, num_with_entropies: int) -> StackedPrediction:
        """tokens: batch x T, the same for all members. num_with_entropies: for how many of the first members."""
        batch, length = tokens.shape
        members, vocab_size, d_model = self.embed.shape
        offsets = torch.arange(members, device=tokens.device).view(-1, 1, 1) * vocab_size
        stream = functional.embedding(tokens + offsets, self.embed.flatten(0, 1))  # members x batch x T x d_model
        stream = (stream + self.position[:, None, :length]).view(members, batch * length, d_model)
        entropies = []
        for layer in self.layers:
            stream, entropy = layer(stream, batch, num_with_entropies)
            entropies.append(entropy)  # members x batch x heads x T
        logits = (self.final_norm(stream) @ self.logits.mT).view(members, batch, length, vocab_size)
        found = [entropy for entropy in entropies if entropy is not None]
        return StackedPrediction(logits, torch.stack(found, dim=1) if found else None)


class _StackedBlock:
    """A = X + MHA(Norm1(X)); Y = A + FFN(Norm2(A)); streams are members x (batch x T) x d_model."""

    def __init__(self, architectures: Sequence[Architecture], index: int, joints: Joints, prefix: str) -> None:
        self.norm1 = _LayerNorms(joints, f"{prefix}norm1")
        self.attention = _Attentions(architectures[0].num_heads, joints, f"{prefix}attention.")
        self.norm2 = _LayerNorms(joints, f"{prefix}norm2")
        self.ffns = _Ffns(architectures, index, joints, f"{prefix}ffn.")

    def __call__(self, stream: Tensor, batch: int, num_with_entropies: int) -> tuple[Tensor, Tensor | None]:
        attended, entropy = self.attention(self.norm1(stream), batch, num_with_entropies)
        stream = stream + attended
        return self.ffns(self.norm2(stream), stream), entropy


class _LayerNorms:
    """Normalises the members that have the norm and passes the others on."""

    def __init__(self, joints: Joints, prefix: str) -> None:
        self.rows = joints.owners(f"{prefix}.weight")
        self.weight, self.bias = joints.join(f"{prefix}.weight"), joints.join(f"{prefix}.bias")

    def __call__(self, stream: Tensor) -> Tensor:
        if self.weight is None or self.bias is None:
            return stream
        normed = functional.layer_norm(self.rows.of(stream), stream.shape[-1:], eps=NORM_EPS)
        return self.rows.put(stream, torch.addcmul(self.bias.unsqueeze(1), normed, self.weight.unsqueeze(1)))


class _Linears:
    """A linear of some members, by default of all."""

    def __init__(self, joints: Joints, prefix: str, rows: MemberRows | None = None) -> None:
        self.weight = _present(joints.join(f"{prefix}.weight", rows))
        self.bias = joints.join(f"{prefix}.bias", rows)

    def __call__(self, source: Tensor) -> Tensor:
        if self.bias is None:
            return source @ self.weight.mT
        return torch.baddbmm(self.bias.unsqueeze(1), source, self.weight.mT)


class _Filled:
    """A parameter of every member, with a constant where a member has none."""

    def __init__(self, joints: Joints, name: str, fill: float) -> None:
        self.rows, self.value, self.fill = joints.owners(name), joints.join(name), fill

    def __call__(self) -> Tensor | None:
        """members x shape, or None if no member has one."""
        if self.value is None:
            return None
        return self.rows.put(self.value.new_full((self.rows.total, *self.value.shape[1:]), self.fill), self.value)


class _Attentions:
    """Causal softmax attention of all members, each with its temperatures, and of 1 without."""

    def __init__(self, num_heads: int, joints: Joints, prefix: str) -> None:
        self.num_heads = num_heads
        self.qkv, self.out = _Linears(joints, f"{prefix}qkv"), _Linears(joints, f"{prefix}out")
        self.log_temperature = _Filled(joints, f"{prefix}temperature.log_weight", 0.0)

    def __call__(self, source: Tensor, batch: int, num_with_entropies: int) -> tuple[Tensor, Tensor | None]:
        members, tokens, d_model = source.shape
        packed = self.qkv(source).view(members, batch, tokens // batch, 3, self.num_heads, d_model // self.num_heads)
        queries, keys, values = packed.permute(3, 0, 1, 4, 2, 5)  # each members x batch x heads x T x head_dim
        if (logs := self.log_temperature()) is not None:
            queries = scale_by_temperature(queries, logs[..., : queries.shape[-2]].exp().unsqueeze(1))
        mixed, entropy = _attend((queries, keys, values), num_with_entropies)
        return self.out(mixed.transpose(2, 3).reshape(source.shape)), entropy


def _attend(operands: tuple[Tensor, ...], num_with_entropies: int) -> tuple[Tensor, Tensor | None]:
    """Attention of all members, with the entropies of the first ones; members and batch are one to the kernel."""
    first = [part[:num_with_entropies] for part in operands]
    rest = [part[num_with_entropies:] for part in operands]
    mixed, entropy = [], None
    if len(first[0]):
        output, rows = causal_attention(*(part.flatten(0, 1) for part in first))
        assert rows is not None
        mixed.append(output.view(first[0].shape))
        entropy = rows.view(first[0].shape[:-1])
    if len(rest[0]):
        output, _ = causal_attention(*(part.flatten(0, 1) for part in rest), with_entropy=False)
        mixed.append(output.view(rest[0].shape))
    return torch.cat(mixed) if len(mixed) > 1 else mixed[0], entropy


class _Ffns:
    """The FFNs of all members, kind by kind, and how each result joins its member's stream."""

    def __init__(self, architectures: Sequence[Architecture], index: int, joints: Joints, prefix: str) -> None:
        kinds: dict[Ffn, list[int]] = {}
        for place, architecture in enumerate(architectures):
            kinds.setdefault(architecture.layers[index].ffn, []).append(place)
        kinds.pop("none", None)
        self.groups = [
            _FfnGroup(architectures[0], kind, joints, prefix, joints.rows(places)) for kind, places in kinds.items()
        ]
        self.alpha = _Filled(joints, f"{prefix}residual.alpha", 1.0)
        self.beta = _Filled(joints, f"{prefix}residual.beta", 1.0)

    def __call__(self, source: Tensor, stream: Tensor) -> Tensor:
        alpha, beta = self.alpha(), self.beta()
        joined = stream if beta is None else beta.view(-1, 1, 1) * stream
        for group in self.groups:
            branch = group(group.rows.of(source))
            scaled = branch if alpha is None else branch / group.rows.of(alpha).view(-1, 1, 1)
            joined = group.rows.add(joined, scaled)
        return joined


class _FfnGroup:
    """The FFN of those members that have one of this kind in a layer."""

    def __init__(self, shape: Architecture, kind: Ffn, joints: Joints, prefix: str, rows: MemberRows) -> None:
        self.rows = rows
        self.fused = _Linears(joints, f"{prefix}fused", rows) if kind == "fused" else None
        if self.fused is None:
            self.up, self.down = _Linears(joints, f"{prefix}up", rows), _Linears(joints, f"{prefix}down", rows)
            slopes = joints.join(f"{prefix}activation.slope", rows)
            self.activation = ACTIVATIONS[kind](shape) if slopes is None else partial(_leaky_relu, slopes)

    def __call__(self, source: Tensor) -> Tensor:
        if self.fused is not None:
            return self.fused(source)
        return self.down(self.activation(self.up(source)))


def _leaky_relu(slopes: Tensor, source: Tensor) -> Tensor:
    """slopes: members x 1. To torch, members are channels."""
    return functional.prelu(source.unsqueeze(0), slopes.flatten()).squeeze(0)


def _present(value: nn.Parameter | None) -> nn.Parameter:
    assert value is not None
    return value
