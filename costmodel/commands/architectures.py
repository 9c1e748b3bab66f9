"""From what a command line names to op graphs: architectures, torch models and the papers' rows."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TypedDict

from costmodel.deployment.deploy import Deployment, deploy
from costmodel.errors import UserError
from costmodel.ops import OpGraph
from costmodel.protocols.published_rows import PublishedRow
from costmodel.tracing.trace import trace
from search_spaces.architecture import Architecture
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import name_of, parse
from search_spaces.resolve import call_factory, is_factory, is_notation, resolve

DEFAULT_DEPLOYMENT = Deployment()


class Title(TypedDict):
    """What the output calls the model."""

    architecture: str
    base: str | None
    seq_len: int
    deployment: Mapping[str, str | int | None]


def lowered(
    arch: str, base: str, dimensions: Dimensions, seq_len: int, deployment: Deployment = DEFAULT_DEPLOYMENT
) -> tuple[Title, OpGraph, Architecture | None]:
    """The architecture is None where a torch model was traced.

    Raises UserError for an unknown architecture or base, or dimensions that do not fit.
    """
    named_base = base if is_notation(arch) else None
    if named_base is None and dimensions != Dimensions():
        raise UserError(f"architecture {arch!r} brings its own dimensions; leave out the flags that change them.")
    if is_factory(arch) and not isinstance(made := call_factory(arch), Architecture):
        title = Title(architecture=arch, base=None, seq_len=seq_len, deployment=asdict(deployment))
        return title, deploy(trace(made, seq_len, name=arch), deployment), None
    named = resolve(arch, base_architecture(base, dimensions))
    name = name_of(named.architecture, entropy_regularised=named.entropy_regularised)
    title = Title(architecture=name, base=named_base, seq_len=seq_len, deployment=asdict(deployment))
    return title, lower(named.architecture, seq_len, deployment), named.architecture


def row_architecture(row: PublishedRow) -> Architecture:
    dimensions = Dimensions(layers=row.num_layers, heads=row.num_heads, d_model=row.d_model, vocab=row.vocab_size)
    return parse(row.notation, base_architecture("gpt2-small", dimensions)).architecture


def row_graph(row: PublishedRow) -> OpGraph:
    return lower(row_architecture(row), row.seq_len)
