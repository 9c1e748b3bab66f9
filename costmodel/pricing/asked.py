"""From what a user names, or gives, to an op graph: notations, files, factories, architectures and torch modules."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias, TypedDict

from costmodel.deployment.deploy import Deployment, Phase, Projection, RunRows, deploy
from costmodel.deployment.generation import NOT_DECODED, generation
from costmodel.errors import UserError
from costmodel.ops import Encoding, GeluForm, OpGraph, SoftmaxForm, TokenEmbedding
from costmodel.tracing.export import Module
from costmodel.tracing.trace import trace
from search_spaces.architecture import Architecture
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.notation import Member, name_of
from search_spaces.resolve import call_factory, is_factory, is_notation, resolve

# a notation, the path of a .yaml file or of an export, `module:factory`, or the model itself
Model: TypeAlias = str | os.PathLike[str] | Architecture | OpGraph | Module
GRAPH = "op graph"  # what an op graph is called, which has no name
BASE, SEQ_LEN = "gpt2-small", 128  # unless given


class Title(TypedDict):
    """What the output calls the model."""

    architecture: str
    base: str | None
    seq_len: int
    deployment: Mapping[str, str | int | None]


class ModelFlags(TypedDict, total=False):
    """What may be said of a model beside its name, as `asked_model` describes it."""

    base: str | None
    layers: int | None
    heads: int | None
    d_model: int | None
    d_ff: int | None
    vocab: int | None
    gelu: GeluForm | None
    softmax: SoftmaxForm | None
    seq_len: int | None
    embedding: Encoding
    projection: Projection
    phase: Phase
    rows: RunRows
    query_block: int | None
    batch: int
    vocab_blocks: int


class AskedModel(NamedTuple):
    """A model as it is asked for.

    architecture: None for an op graph, given or traced from a torch module. whole: the graph of a prompt of so many
    tokens, before it is deployed.
    """

    title: Title
    graph: OpGraph
    architecture: Architecture | None
    deployment: Deployment
    whole: Callable[[int], OpGraph]

    @property
    def folded(self) -> "AskedModel | None":
        """What folding leaves of it to deploy; None where there is an op graph alone."""
        if self.architecture is None:
            return None
        left = deployed(self.architecture)
        graph = lower(left, self.title["seq_len"], self.deployment)
        return self._replace(graph=graph, architecture=left, whole=partial(lower, left))

    @property
    def answering(self) -> "AskedModel":
        """Itself where the last logits of the prompt alone are read, as for new tokens.

        Raises UserError for phase decode, which reads no prompt.
        """
        if self.deployment.phase == "decode":
            raise UserError(NOT_DECODED)
        deployment = replace(self.deployment, projection="last")
        title = Title(**{**self.title, "deployment": asdict(deployment)})
        graph = deploy(self.whole(self.title["seq_len"]), deployment)
        return self._replace(title=title, graph=graph, deployment=deployment)

    def runs(self, new_tokens: int | None) -> list[OpGraph]:
        """What is run for each new token; None: once, as it is deployed.

        Raises UserError for no new token, or more than the model reads.
        """
        if new_tokens is None:
            return [self.graph]
        return generation(
            self.whole,
            prompt_len=self.title["seq_len"],
            new_tokens=new_tokens,
            deployment=self.deployment,
            context=None if self.architecture is None else self.architecture.context,
        )


def asked_model(
    model: Model,
    *,
    base: str | None = None,
    layers: int | None = None,
    heads: int | None = None,
    d_model: int | None = None,
    d_ff: int | None = None,
    vocab: int | None = None,
    gelu: GeluForm | None = None,
    softmax: SoftmaxForm | None = None,
    seq_len: int | None = None,
    embedding: Encoding = "one-hot",
    projection: Projection = "all",
    phase: Phase = "prefill",
    rows: RunRows = "all",
    query_block: int | None = None,
    batch: int = 1,
    vocab_blocks: int = 1,
) -> AskedModel:
    """The model that a name, or a model itself, and its flags stand for. The commands have these flags of here.

    Raises UserError for an unknown architecture or base, dimensions that do not fit, a flag that a model of its own
    dimensions or tokens cannot take, or a way that it cannot be run in.

    Args:
        model: a notation such as SM+ScFuFFN_i6, the path of an architecture's .yaml file or of an export's folder,
            module:factory, an Architecture, the op graph of a prompt, or a torch module of 1 x T token ids.
        base: the model whose dimensions a name is placed on (gpt2-small unless given).
        layers: number of layers, instead of the base's.
        heads: attention heads per layer, instead of the base's.
        d_model: features of the residual stream, instead of the base's.
        d_ff: features inside the FFN (4 * d_model unless given).
        vocab: tokens in the vocabulary, instead of the base's.
        gelu: the form of every GELU, instead of the base's.
        softmax: softmax in every layer, or a form that takes its place, instead of the base's.
        seq_len: tokens of the prompt (128 unless given, or those of an op graph).
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
    return _asked(model, base, dimensions, seq_len, deployment)


def _asked(
    model: Model, base: str | None, dimensions: Dimensions, seq_len: int | None, deployment: Deployment
) -> AskedModel:
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else None
    is_named = name is not None and is_notation(name)
    if not is_named and (base is not None or dimensions != Dimensions()):
        shown = type(model).__name__ if name is None else repr(name)
        raise UserError(
            f"architecture {shown} brings its own dimensions; leave out the flags that give or change them."
        )
    made = call_factory(name) if name is not None and is_factory(name) else model if name is None else None
    if isinstance(made, Architecture):
        return _of_member(Member(architecture=made, entropy_regularised=False), None, seq_len, deployment)
    if made is not None:
        return _of_module_or_graph(made, name, seq_len, deployment)
    assert name is not None
    base = BASE if base is None else base
    member = resolve(name, base_architecture(base, dimensions))
    return _of_member(member, base if is_named else None, seq_len, deployment)


def _of_member(member: Member, base: str | None, seq_len: int | None, deployment: Deployment) -> AskedModel:
    architecture, seq_len = member.architecture, SEQ_LEN if seq_len is None else seq_len
    name = name_of(architecture, entropy_regularised=member.entropy_regularised)
    title = Title(architecture=name, base=base, seq_len=seq_len, deployment=asdict(deployment))
    graph, whole = lower(architecture, seq_len, deployment), partial(lower, architecture)
    return AskedModel(title, graph, architecture, deployment, whole)


def _of_module_or_graph(made: Module, name: str | None, seq_len: int | None, deployment: Deployment) -> AskedModel:
    """Of an op graph, which has tokens of its own, or a torch module. Raises UserError for anything else."""
    asked_len = SEQ_LEN if seq_len is None else seq_len
    if isinstance(made, OpGraph):
        known = next((node.op.tokens for node in made if isinstance(node.op, TokenEmbedding)), asked_len)
        if seq_len not in (None, known):
            raise UserError(f"an op graph of {known} tokens is priced at these, but got {seq_len=}; leave it out.")
        title = Title(architecture=name or GRAPH, base=None, seq_len=known, deployment=asdict(deployment))
        return AskedModel(title, deploy(made, deployment), None, deployment, partial(_of_length, made, known))
    called = name or type(made).__name__
    title = Title(architecture=called, base=None, seq_len=asked_len, deployment=asdict(deployment))
    traced = cache(partial(trace, made, name=called))  # a trace takes seconds, and new tokens read it again
    return AskedModel(title, deploy(traced(asked_len), deployment), None, deployment, traced)


def _of_length(graph: OpGraph, known: int, tokens: int) -> OpGraph:
    """Raises UserError unless it is the graph of so many tokens."""
    if tokens != known:
        raise UserError(
            f"an op graph must be of as many tokens as are read, but is of {known} and new tokens read {tokens}; give "
            "the architecture or the torch module."
        )
    return graph


# the flags of a model as they are if none is given
USUAL_FLAGS: dict[str, Any] = asked_model.__kwdefaults__ or {}
