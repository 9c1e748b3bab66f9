"""Makes op graphs of models that users name or pass: notations, files, factories, architectures and torch modules."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from typing import Any, TypeAlias, TypeVar

from costmodel.deployment.deploy import NOT_DECODED, Deployment, deploy, generation
from costmodel.errors import UserError
from costmodel.ops import OpGraph, TokenEmbedding
from costmodel.tracing.trace import Module, trace
from costmodel.trust import shown
from search_spaces.architecture import Architecture
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.checkpoints.checkpoint import read_checkpoint
from search_spaces.deployed import deployed
from search_spaces.lower import lower
from search_spaces.notation import Member, name_of
from search_spaces.resolve import call_factory, is_checkpoint_name, is_factory, is_notation, resolve

# a notation, the path of a .yaml file, export or checkpoint, a checkpoint's name, `module:factory`, or the model itself
Model: TypeAlias = str | os.PathLike[str] | Architecture | OpGraph | Module
T = TypeVar("T", Dimensions, Deployment)
BASE, SEQ_LEN = "gpt2-small", 128  # defaults


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Deployment, Dimensions):
    """Options of a model: its dimensions (`Dimensions`; `price` refuses `context`) and how it is run (`Deployment`).

    Args:
        base: model that gives a named architecture its dimensions (default gpt2-small).
        seq_len: tokens of the prompt (default 128, or those of an op graph).
    """

    base: str | None = None
    seq_len: int | None = None

    def part(self, kind: type[T]) -> T:
        """Return the `Dimensions` or the `Deployment` among these options."""
        names = [field.name for field in fields(kind)]
        return kind(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model that a user asked for, and how it is run.

    name: its name in output. base: the base model of a notation, None for other models. seq_len: tokens of the prompt.
    architecture: None for an op graph or a torch module. how: how a checkpoint's op graph is made, in words; empty for
    other models. whole: function that returns the graph of a number of prompt tokens, before `deploy`.
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
        """The op graph after `deploy`; a UserError is raised if the model cannot be run in this way."""
        return deploy(self.whole(self.seq_len), self.deployment)

    @property
    def title(self) -> dict[str, Any]:
        """The model's fields in JSON output."""
        return {"architecture": self.name, "base": self.base, "seq_len": self.seq_len}

    @property
    def heading(self) -> str:
        """The model's description in printed output."""
        how = f" on {self.base}" if self.base else f" ({self.how})" if self.how else ""
        return f"{self.name}{how}, T={self.seq_len}"

    @property
    def whose(self) -> str:
        """Text on the layers that are public or computed by the client; empty if there are none."""
        return shown(self.deployment.public_layers, self.deployment.client_layers)

    @property
    def folded(self) -> "ModelSpec | None":
        """The folded model; None without `architecture`, or if folding would change what an option means.

        It would if it removes layers while `public_layers`, or `client_layers` other than 0, numbers layers.
        """
        if self.architecture is None:
            return None
        left = deployed(self.architecture)
        is_numbered = self.deployment.public_layers is not None or bool(self.deployment.client_layers)
        if is_numbered and left.num_layers != self.architecture.num_layers:
            return None
        return replace(self, name=name_of(left), architecture=left, whole=partial(lower, left))

    @property
    def answering(self) -> "ModelSpec":
        """The same model, run for only the logits of the last prompt token, which are enough to generate new tokens.

        A UserError is raised for phase decode, which does not read the whole prompt.
        """
        if self.deployment.phase == "decode":
            raise UserError(NOT_DECODED)
        return replace(self, deployment=replace(self.deployment, projection="last"))

    def runs(self, new_tokens: int | None) -> list[OpGraph]:
        """Return the op graph of each run: one per new token, or a single one if `new_tokens` is None.

        A UserError is raised if `new_tokens` is below 1, the tokens do not fit the context, or the model cannot be run
        in this way.
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


def resolve_model(model: Model, options: ModelOptions = ModelOptions()) -> ModelSpec:
    """Return the `ModelSpec` of a model, given by name or as an object, with its options.

    Args:
        model: a notation such as SM+ScFuFFN_i6, the path of an architecture's .yaml file or of an export's folder, a
            checkpoint (folder, config.json, .gguf file or OWNER/NAME of the hub), module:factory, an Architecture, the
            op graph of a prompt, or a torch module of 1 x T token ids.
        options: dimensions of the model, and how it is run.

    Raises:
        UserError: If the architecture or base is unknown or cannot be read, dimensions do not fit together, a model
            that brings its own dimensions is given any, or an op graph another number of tokens than its own.
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
        return ModelSpec(
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
        name, whole = name or "op graph", partial(_of_length, made, tokens)
    else:
        name = name or type(made).__name__
        whole = cache(partial(trace, made, name=name))  # a trace takes seconds and is needed again for new tokens
    return ModelSpec(
        name=name, base=None, seq_len=tokens, deployment=deployment, architecture=None, whole=whole, how=how
    )


def _of_length(graph: OpGraph, known: int, tokens: int) -> OpGraph:
    if tokens != known:  # an op graph is of one prompt length
        raise UserError(
            f"an op graph must be of as many tokens as are read, but is of {known} and new tokens read {tokens}; give "
            "the architecture or the torch module."
        )
    return graph
