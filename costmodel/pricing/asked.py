"""Makes an op graph of what a user names, or gives: notations, files, factories, architectures and torch modules."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from typing import Any, TypeAlias, TypeVar

from costmodel.deployment.deploy import NOT_DECODED, Deployment, deploy, generation
from costmodel.errors import UserError
from costmodel.ops import OpGraph, TokenEmbedding
from costmodel.tracing.export import Module
from costmodel.tracing.trace import trace
from costmodel.trust import shown
from search_spaces.architecture import Architecture
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.checkpoints.checkpoint import read_checkpoint
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.notation import Member, name_of
from search_spaces.resolve import call_factory, is_checkpoint_name, is_factory, is_notation, resolve

# a notation, the path of a .yaml file, an export or a checkpoint, `module:factory`, or the model itself
Model: TypeAlias = str | os.PathLike[str] | Architecture | OpGraph | Module
T = TypeVar("T", Dimensions, Deployment)
GRAPH = "op graph"  # what an op graph is called, which has no name
BASE, SEQ_LEN = "gpt2-small", 128  # unless given


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Deployment, Dimensions):
    """What may be said of a model beside its name: `Dimensions` but its context, and how it is run, `Deployment`.

    Args:
        base: the model whose dimensions a name is placed on (gpt2-small unless given).
        seq_len: tokens of the prompt (128 unless given, or those of an op graph).
    """

    base: str | None = None
    seq_len: int | None = None

    def part(self, kind: type[T]) -> T:
        """The fields of `Dimensions` or `Deployment` alone."""
        names = [field.name for field in fields(kind)]
        return kind(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class AskedModel:
    """A model as it is asked for.

    name: for people. how: where the op graph of a checkpoint comes from. architecture: None for an op graph, given or
    traced from a torch module. whole: the graph of a prompt of so many tokens, before it is deployed.
    """

    name: str
    base: str | None
    seq_len: int
    deployment: Deployment
    architecture: Architecture | None
    whole: Callable[[int], OpGraph]
    how: str = ""

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
        how = f" on {self.base}" if self.base else f" ({self.how})" if self.how else ""
        return f"{self.name}{how}, T={self.seq_len}"

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
        return replace(self, name=name_of(left), architecture=left, whole=partial(lower, left))

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


def asked_model(model: Model, options: ModelOptions = ModelOptions()) -> AskedModel:
    """The model that a name, or a model itself, and its options stand for.

    Raises UserError for an unknown architecture or base, dimensions that do not fit, an option that a model of its own
    dimensions or tokens cannot take, or a way that it cannot be run in.

    Args:
        model: a notation such as SM+ScFuFFN_i6, the path of an architecture's .yaml file or of an export's folder, a
            checkpoint (folder, config.json, .gguf file or OWNER/NAME of the hub), module:factory, an Architecture, the
            op graph of a prompt, or a torch module of 1 x T token ids.
        options: of the model, and how it is run.
    """
    dimensions, deployment = options.part(Dimensions), options.part(Deployment)
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else None
    is_named = name is not None and is_notation(name)
    if not is_named and (options.base is not None or dimensions != Dimensions()):
        shown = type(model).__name__ if name is None else repr(name)
        raise UserError(
            f"architecture {shown} brings its own dimensions; leave out the flags that give or change them."
        )
    tokens = SEQ_LEN if options.seq_len is None else options.seq_len
    made, how = model if name is None else None, ""
    if name is not None and is_checkpoint_name(name):
        made, how = (checkpoint := read_checkpoint(name)).model, checkpoint.told
    elif name is not None and is_factory(name):
        made = call_factory(name)
    if made is None or isinstance(made, Architecture):
        base = BASE if options.base is None else options.base
        if made is None:
            member = resolve(str(name), base_architecture(base, dimensions))
        else:
            member = Member(architecture=made, entropy_regularised=False)
        return AskedModel(
            name=name if name and how else name_of(member.architecture, entropy_regularised=member.entropy_regularised),
            base=base if is_named else None,
            seq_len=tokens,
            deployment=deployment,
            architecture=member.architecture,
            whole=partial(lower, member.architecture),
            how=how,
        )
    whole: Callable[[int], OpGraph]
    if isinstance(made, OpGraph):
        tokens = next((node.op.tokens for node in made if isinstance(node.op, TokenEmbedding)), tokens)
        if options.seq_len not in (None, tokens):
            raise UserError(
                f"an op graph of {tokens} tokens is priced at these, but got seq_len={options.seq_len}; leave it out."
            )
        name, whole = name or GRAPH, partial(_of_length, made, tokens)
    else:
        name = name or type(made).__name__
        whole = cache(partial(trace, made, name=name))  # a trace takes seconds, and new tokens read it again
    return AskedModel(
        name=name, base=None, seq_len=tokens, deployment=deployment, architecture=None, whole=whole, how=how
    )


def _of_length(graph: OpGraph, known: int, tokens: int) -> OpGraph:
    """Raises UserError unless it is the graph of so many tokens."""
    if tokens != known:
        raise UserError(
            f"an op graph must be of as many tokens as are read, but is of {known} and new tokens read {tokens}; give "
            "the architecture or the torch module."
        )
    return graph
