from itertools import pairwise, product

import networkx as nx
import pytest

from search_spaces.architecture import Layer, default_final_norm, least_rank
from search_spaces.block import BLOCKS
from search_spaces.forms import NORMS, Norm
from search_spaces.graph import (
    SINK,
    Boundary,
    Choice,
    ConstraintName,
    Head,
    completions,
    free_graph,
    listed_graph,
    source,
    walk,
)

RULE: ConstraintName = "ffn-removed-only-in-deepest-suffix"
KEPT, NORMED, REMOVED = Layer(ffn="relu"), Layer(norm1="layernorm", ffn="relu"), Layer(ffn="none")
ALPHABET = (KEPT, NORMED, REMOVED)


def placements(graph: nx.DiGraph) -> list[tuple[Layer, ...]]:
    paths = nx.all_simple_paths(graph, source(graph), SINK)
    return [tuple(vertex.layer for vertex in path if isinstance(vertex, Choice)) for path in paths]


def test_ffns_are_removed_in_a_deepest_suffix_and_listed_placements_share_their_ends():
    allowed = [
        word
        for word in product(ALPHABET, repeat=3)
        if not any(first is REMOVED and second is not REMOVED for first, second in pairwise(word))
    ]
    assert placements(free_graph(3, BLOCKS["gpt2"], ALPHABET, (RULE,))) == allowed
    graph = listed_graph(BLOCKS["gpt2"], [(KEPT, KEPT, REMOVED), (REMOVED, KEPT, REMOVED)])
    assert sum(isinstance(vertex, Choice) for vertex in graph) == 4  # two first layers, one second, one third


@pytest.mark.parametrize("block", BLOCKS)
def test_states_say_which_norm_is_highest_and_whether_one_is_live(block):
    """A frozen norm has a rank and is not live; the first norm of block `sas` makes the stream and does not read it."""
    norms: list[Norm] = ["frozen-layernorm", "rmsnorm", "none"]
    alphabet = [Layer(norm1=norm1, norm2=norm2) for norm1, norm2 in product(norms, repeat=2)]
    graph = free_graph(2, BLOCKS[block], alphabet, ())
    for word in product(alphabet, repeat=2):
        path = walk(graph, source(graph), word)
        read = [norm for layer in word for norm in (layer.norm1, layer.norm2)]
        least = least_rank(BLOCKS[block])
        rank = max(least, *(NORMS[norm].rank for norm in read))
        uncentred = rank <= NORMS["frozen-layernorm"].rank and "none" in read
        assert path[-1].state == (rank, int("rmsnorm" in read[block == "sas" :]), int(uncentred), 1)
        heads = [vertex for vertex in graph.succ[path[-1]] if isinstance(vertex, Head)]
        assert heads == [Head(final_norm=default_final_norm(word, least))]


def test_every_choice_lies_on_a_path_which_a_walk_follows():
    graph = free_graph(4, BLOCKS["gpt2"], ALPHABET, (RULE,))
    counts = completions(graph)
    assert nx.is_directed_acyclic_graph(graph)
    assert all(counts[vertex] > 0 for vertex in graph)
    for vertex in graph:
        if isinstance(vertex, Choice):
            assert (graph.in_degree(vertex), graph.out_degree(vertex)) == (1, 1)
    graph = free_graph(2, BLOCKS["gpt2"], ALPHABET, (RULE,))
    path = walk(graph, source(graph), (NORMED, REMOVED))
    assert path[::2] == [
        Boundary(depth=0, state=(0, 0, 0, 0, 0)),  # the norm's rank, live, uncentred, capped logits, the constraint's
        Boundary(depth=1, state=(NORMS["layernorm"].rank, 1, 0, 1, 0)),
        Boundary(depth=2, state=(NORMS["layernorm"].rank, 1, 0, 1, 1)),
    ]
    assert [vertex.layer for vertex in path if isinstance(vertex, Choice)] == [NORMED, REMOVED]
    assert walk(graph, source(graph), (REMOVED, KEPT)) is None


def test_spaces_without_members_of_one_length_are_refused():
    for members in ([], [(KEPT,), (KEPT, KEPT)]):
        with pytest.raises(ValueError, match="members must be at least one and have the same number of layers"):
            listed_graph(BLOCKS["gpt2"], members)
    with pytest.raises(ValueError, match="leave no architecture in the space"):
        free_graph(2, BLOCKS["gpt2"], (), ())
