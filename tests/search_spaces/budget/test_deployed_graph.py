import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.cost import Budget
from costmodel.estimate import Pricer, estimate
from search_spaces.architecture import Architecture, Layer, Norm
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.block import BLOCKS, BlockName
from search_spaces.budget.deployed_graph import deployed_graph
from search_spaces.budget.feasible import num_deployed, within_budget
from search_spaces.budget.priced_space import EMPTY_LAYER, deployed_costs, price_space
from search_spaces.definition import Definition
from search_spaces.deployed import deployed
from search_spaces.graph import SINK, Choice, ConstraintName, Head, completions, free_graph, listed_graph, source
from search_spaces.lower import lower
from search_spaces.space import SearchSpace, load_space, members
from tests.search_spaces.conftest import drawn_layers

RULE: ConstraintName = "ffn-removed-only-in-deepest-suffix"
BASES: dict[BlockName, str] = {"gpt2": "tiny", "pythia": "pythia-70m"}
NORMS: tuple[Norm, ...] = ("layernorm", "rmsnorm", "frozen-layernorm", "none")
ALONE = (Layer(ffn="none"), Layer(attention="none", ffn="relu"), Layer(attention="none", ffn="fused"), EMPTY_LAYER)


# mostly what folding changes: linear FFNs, frozen norms, attention or FFN alone, nothing
LAYERS = drawn_layers(NORMS, ("softmax", "softmax-temperature", "none"), ("relu", "identity", "fused", "none"))


@st.composite
def spaces(draw: st.DrawFn) -> SearchSpace:
    """Three layers of up to seven choices, with the constraint or without; or up to 20 listed placements of those."""
    block = draw(st.sampled_from(tuple(BASES)))
    alphabet = draw(st.lists(LAYERS | st.sampled_from(ALONE), min_size=1, max_size=7, unique=True))
    base = base_architecture(BASES[block], Dimensions(layers=3, heads=2, d_model=16, vocab=32, context=16))
    words = st.lists(st.tuples(*[st.sampled_from(alphabet)] * 3), min_size=1, max_size=20)
    if listed := draw(st.none() | words):
        graph = listed_graph(BLOCKS[block], listed)
    else:
        graph = free_graph(3, BLOCKS[block], alphabet, draw(st.sampled_from([(), (RULE,)])))
    definition = Definition(name="drawn", base="tiny", members=("SM",), entropy_regularisation=(False,))
    return SearchSpace(definition=definition, base=base, graph=graph, completions=completions(graph))


def deployed_members(space: SearchSpace) -> set[Architecture]:
    return {deployed(member.architecture) for member in members(space)}


def spelled(graph: nx.DiGraph) -> list[tuple[tuple[Layer, ...], Norm]]:
    """The layers and the final norm of every path, without the empty layers at its end; one where there is nothing."""
    words = []
    for path in nx.all_simple_paths(graph, source(graph), SINK):
        word = [vertex.layer for vertex in path if isinstance(vertex, Choice)]
        while len(word) > 1 and word[-1] == EMPTY_LAYER:
            word.pop()
        (head,) = (vertex for vertex in path if isinstance(vertex, Head))
        words.append((tuple(word), head.final_norm))
    return words


@given(space=spaces())
def test_there_is_one_path_for_each_deployed_architecture(space: SearchSpace) -> None:
    graph, expected = deployed_graph(space), deployed_members(space)
    words = spelled(graph)
    assert completions(graph)[source(graph)] == len(words) == len(expected)
    assert set(words) == {(architecture.layers, architecture.final_norm) for architecture in expected}
    assert nx.is_directed_acyclic_graph(graph)
    assert all(nx.has_path(graph, vertex, SINK) for vertex in graph)


@given(space=spaces(), share=st.floats(0, 1))
def test_those_within_a_budget_are_counted_exactly(space: SearchSpace, share: float, sizes: Pricer) -> None:
    """Prices are whole seconds and bytes; half a second clears the slack of the count."""
    costs = [estimate(lower(member, 8), sizes).total for member in deployed_members(space)]
    latencies = sorted({cost.latency_s for cost in costs})
    bound = latencies[int(share * (len(latencies) - 1))]
    for budget in (
        Budget(latency_s=bound + 0.5),
        Budget(latency_s=bound + 0.5, sent_bytes=sorted(cost.sent_bytes for cost in costs)[len(costs) // 2] + 0.5),
        Budget(),
    ):
        expected = sum(budget.admits(cost) for cost in costs)
        assert num_deployed(within_budget(price_space(space, sizes, 8), budget)) == (len(costs), expected)


@given(space=spaces())
def test_a_path_costs_what_its_architecture_costs(space: SearchSpace, sizes: Pricer) -> None:
    priced, graph = price_space(space, sizes, 8), deployed_graph(space)
    costs = deployed_costs(priced, graph)
    path_costs = sorted(
        sum(costs[vertex][0] for vertex in path if vertex in costs)
        for path in nx.all_simple_paths(graph, source(graph), SINK)
    )
    expected = sorted(estimate(lower(member, 8), sizes).total.latency_s for member in deployed_members(space))
    assert path_costs == [seconds * 2**38 for seconds in expected]


@pytest.mark.parametrize("name", ["tiny", "ladder"])
def test_counts_of_the_small_shipped_spaces(name: str) -> None:
    """Four on the ladder: LN+G, LN+R, and attention alone with a temperature and without."""
    space = load_space(name)
    graph = deployed_graph(space)
    num = completions(graph)[source(graph)]
    assert num == len(deployed_members(space))
    assert name != "ladder" or num == 4


def test_the_large_space_is_smaller_deployed() -> None:
    space = load_space("gpt2-small")
    graph = deployed_graph(space)
    assert 84**11 < completions(graph)[source(graph)] < space.completions[source(space.graph)] // 1000
