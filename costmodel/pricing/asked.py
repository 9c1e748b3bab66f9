"""Makes an op graph of what a user names, or gives: notations, files, factories, architectures and torch modules."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, TypeAlias, TypedDict

from costmodel.deployment.deploy import NOT_DECODED, Deployment, Phase, Projection, RunRows, deploy, generation
from costmodel.errors import UserError
from costmodel.ops import Encoding, GeluForm, OpGraph, SoftmaxForm, TokenEmbedding
from costmodel.tracing.export import Module
from costmodel.tracing.trace import trace
from costmodel.trust import shown
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


class ModelFlags(TypedDict, total=False):
    """What may be said of a model beside its name, as `asked_model` describes it."""

    base: str | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    head_size: int | None
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
    public_layers: str | None
    client_layers: int | None


@dataclass(frozen=True, kw_only=True)
class AskedModel:
    """A model as it is asked for.

    name: for people. architecture: None for an op graph, given or traced from a torch module. whole: the graph of a
    prompt of so many tokens, before it is deployed.
    """

    name: str
    base: str | None
    seq_len: int
    deployment: Deployment
    architecture: Architecture | None
    whole: Callable[[int], OpGraph]

    @cached_property
    def graph(self) -> OpGraph:
        """The graph of a prompt of `seq_len` tokens as it is run. Raises UserError for a way that it cannot be."""
        return deploy(self.whole(self.seq_len), self.deployment)

    @property
    def title(self) -> dict[str, Any]:
        """The model as output names it."""
        return {"architecture": self.name, "base": self.base, "seq_len": self.seq_len}

    @property
    def heading(self) -> str:
        """The same for people."""
        return f"{self.name}{f' on {self.base}' if self.base else ''}, T={self.seq_len}"

    @property
    def whose(self) -> str:
        """What to say behind whom a price trusts."""
        return shown(self.deployment.public_layers, self.deployment.client_layers)

    @property
    def folded(self) -> "AskedModel | None":
        """The form that folding leaves to deploy; None of an op graph, or where layers that are named by number
        get other ones."""
        if self.architecture is None:
            return None
        left = deployed(self.architecture)
        named = (self.deployment.public_layers, self.deployment.client_layers)
        if named != (None, None) and left.num_layers != self.architecture.num_layers:
            return None
        return replace(self, architecture=left, whole=partial(lower, left))

    @property
    def answering(self) -> "AskedModel":
        """Itself where the last logits of the prompt alone are read, as for new tokens.

        Raises UserError for phase decode, which reads no prompt.
        """
        if self.deployment.phase == "decode":
            raise UserError(NOT_DECODED)
        return replace(self, deployment=replace(self.deployment, projection="last"))

    def runs(self, new_tokens: int | None) -> list[OpGraph]:
        """What is run for each new token; None: once, as it is deployed.

        Raises UserError for no new token, or more than the model reads.
        """
        if new_tokens is None:
            return [self.graph]
        return generation(
            self.whole,
            prompt_len=self.seq_len,
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
    kv_heads: int | None = None,
    head_size: int | None = None,
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
    public_layers: str | None = None,
    client_layers: int | None = None,
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
        kv_heads: heads of keys and of values that those share, instead of the base's.
        head_size: features of a head, instead of the base's (d_model / heads unless that says otherwise).
        d_model: features of the residual stream, instead of the base's.
        d_ff: features inside the FFN (as many times d_model as the base has unless given: 4, GPT-2).
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
        public_layers: whose weights all parties have, as of a checkpoint that nobody fine-tuned: numbers from 0 and
            ranges, embed and head, such as 0-5,7.
        client_layers: so many first layers, and the embedding, that the client computes in the clear by weights that it
            has; 0 for the embedding alone.
    """
    dimensions = Dimensions(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        d_model=d_model,
        d_ff=d_ff,
        vocab=vocab,
        gelu=gelu,
        softmax=softmax,
    )
    deployment = Deployment(
        embedding=embedding,
        projection=projection,
        phase=phase,
        rows=rows,
        query_block=query_block,
        batch=batch,
        vocab_blocks=vocab_blocks,
        public_layers=public_layers,
        client_layers=client_layers,
    )
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else None
    is_named = name is not None and is_notation(name)
    if not is_named and (base is not None or dimensions != Dimensions()):
        shown = type(model).__name__ if name is None else repr(name)
        raise UserError(
            f"architecture {shown} brings its own dimensions; leave out the flags that give or change them."
        )
    made = call_factory(name) if name is not None and is_factory(name) else model if name is None else None
    if isinstance(made, Architecture):
        member = Member(architecture=made, entropy_regularised=False)
    elif made is not None:
        return _of_module_or_graph(made, name, seq_len, deployment)
    else:
        base = BASE if base is None else base
        member = resolve(str(name), base_architecture(base, dimensions))
    return AskedModel(
        name=name_of(member.architecture, entropy_regularised=member.entropy_regularised),
        base=base if is_named else None,
        seq_len=SEQ_LEN if seq_len is None else seq_len,
        deployment=deployment,
        architecture=member.architecture,
        whole=partial(lower, member.architecture),
    )


def _of_module_or_graph(made: Module, name: str | None, seq_len: int | None, deployment: Deployment) -> AskedModel:
    """The model of an op graph, which has its own tokens, or of a torch module. Raises UserError for anything else."""
    tokens = SEQ_LEN if seq_len is None else seq_len
    whole: Callable[[int], OpGraph]
    if isinstance(made, OpGraph):
        tokens = next((node.op.tokens for node in made if isinstance(node.op, TokenEmbedding)), tokens)
        if seq_len not in (None, tokens):
            raise UserError(f"an op graph of {tokens} tokens is priced at these, but got {seq_len=}; leave it out.")
        name, whole = name or GRAPH, partial(_of_length, made, tokens)
    else:
        name = name or type(made).__name__
        whole = cache(partial(trace, made, name=name))  # a trace takes seconds, and new tokens read it again
    return AskedModel(name=name, base=None, seq_len=tokens, deployment=deployment, architecture=None, whole=whole)


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
