"""The papers' printed rows as architectures and op graphs."""

from costmodel.ops import OpGraph
from costmodel.protocols.published_rows import PublishedRow
from search_spaces.architecture import Architecture
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.lower import lower
from search_spaces.notation import parse


def row_architecture(row: PublishedRow) -> Architecture:
    dimensions = Dimensions(layers=row.num_layers, heads=row.num_heads, d_model=row.d_model, vocab=row.vocab_size)
    return parse(row.notation, base_architecture("gpt2-small", dimensions)).architecture


def row_graph(row: PublishedRow) -> OpGraph:
    return lower(row_architecture(row), row.seq_len)
