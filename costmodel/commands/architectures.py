"""From what a command line names to op graphs: architectures, torch models and the papers' rows."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, TypedDict

from costmodel.deployment.deploy import Deployment, Phase, Projection, RunRows, deploy
from costmodel.deployment.generation import generation
from costmodel.errors import UserError
from costmodel.ops import Encoding, GeluForm, OpGraph, SoftmaxForm
from costmodel.protocols.published_rows import PublishedRow
from costmodel.tracing.trace import trace
from search_spaces.architecture import Architecture
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.notation import name_of, parse
from search_spaces.resolve import call_factory, is_factory, is_notation, resolve


class Title(TypedDict):
    """What the output calls the model."""

    architecture: str
    base: str | None
    seq_len: int
    deployment: Mapping[str, str | int | None]


class AskedModel(NamedTuple):
    """A model as a command line asks for it.

    architecture: None where a torch model was traced. whole: its graph for a prompt of so many tokens, before it is
    deployed.
    """

    title: Title
    graph: OpGraph
    architecture: Architecture | None
    deployment: Deployment
    whole: Callable[[int], OpGraph]

    @property
    def folded(self) -> "AskedModel | None":
        """What folding leaves of it to deploy; None where a torch model was traced."""
        if self.architecture is None:
            return None
        left = deployed(self.architecture)
        graph = lower(left, self.title["seq_len"], self.deployment)
        return self._replace(graph=graph, architecture=left, whole=partial(lower, left))

    def runs(self, new_tokens: int) -> list[OpGraph]:
        """What is run for each new token of the prompt, whose last logits alone are read.

        Raises UserError for no new token, phase decode, or more tokens than the model reads.
        """
        return generation(
            self.whole,
            prompt_len=self.title["seq_len"],
            new_tokens=new_tokens,
            deployment=self.deployment,
            context=None if self.architecture is None else self.architecture.context,
        )


def asked_model(
    arch: str,
    *,
    base: str = "gpt2-small",
    layers: int | None = None,
    heads: int | None = None,
    d_model: int | None = None,
    d_ff: int | None = None,
    vocab: int | None = None,
    gelu: GeluForm | None = None,
    softmax: SoftmaxForm | None = None,
    seq_len: int = 128,
    embedding: Encoding = "one-hot",
    projection: Projection = "all",
    phase: Phase = "prefill",
    rows: RunRows = "all",
    query_block: int | None = None,
    batch: int = 1,
    vocab_blocks: int = 1,
) -> AskedModel:
    """The model that an ARCH and its flags stand for. The commands that price models have these flags of here.

    Raises UserError for an unknown architecture or base, dimensions that do not fit, or a way that it cannot be run in.

    Args:
        arch: as the commands say.
        base: the model whose dimensions a name is placed on.
        layers: number of layers, instead of the base's.
        heads: attention heads per layer, instead of the base's.
        d_model: features of the residual stream, instead of the base's.
        d_ff: features inside the FFN (4 * d_model unless given).
        vocab: tokens in the vocabulary, instead of the base's.
        gelu: the form of every GELU, instead of the base's.
        softmax: softmax in every layer, or a form that takes its place, instead of the base's.
        seq_len: tokens of the prompt.
        embedding: tokens one-hot encoded by the client, or looked up under the protocol.
        projection: logits of all tokens, or of the last one.
        phase: the whole prompt, or one more token after seq_len - 1 whose keys and values are kept.
        rows: all tokens through every layer, or each only as far as the logits of the last one need it.
        query_block: queries that go through attention at a time, against the keys up to their end; by default all.
        batch: sequences at once, of seq_len tokens each.
        vocab_blocks: blocks of entries that the vocabulary projection is computed in, such as 2 for halves.
    """
    dimensions = Dimensions(
        layers=layers, heads=heads, d_model=d_model, d_ff=d_ff, vocab=vocab, gelu=gelu, softmax=softmax
    )
    deployment = Deployment(
        embedding=embedding,
        projection=projection,
        phase=phase,
        rows=rows,
        query_block=query_block,
        batch=batch,
        vocab_blocks=vocab_blocks,
    )
    named_base = base if is_notation(arch) else None
    if named_base is None and dimensions != Dimensions():
        raise UserError(f"architecture {arch!r} brings its own dimensions; leave out the flags that change them.")

    def title(name: str) -> Title:
        return Title(architecture=name, base=named_base, seq_len=seq_len, deployment=asdict(deployment))

    if is_factory(arch) and not isinstance(made := call_factory(arch), Architecture):
        traced = partial(trace, made, name=arch)
        return AskedModel(title(arch), deploy(traced(seq_len), deployment), None, deployment, traced)
    named = resolve(arch, base_architecture(base, dimensions))
    name = name_of(named.architecture, entropy_regularised=named.entropy_regularised)
    graph, whole = lower(named.architecture, seq_len, deployment), partial(lower, named.architecture)
    return AskedModel(title(name), graph, named.architecture, deployment, whole)


# the flags of a model as they are if none is given
USUAL_FLAGS: dict[str, Any] = asked_model.__kwdefaults__ or {}


def row_architecture(row: PublishedRow) -> Architecture:
    dimensions = Dimensions(layers=row.num_layers, heads=row.num_heads, d_model=row.d_model, vocab=row.vocab_size)
    return parse(row.notation, base_architecture("gpt2-small", dimensions)).architecture


def row_graph(row: PublishedRow) -> OpGraph:
    return lower(row_architecture(row), row.seq_len)
