"""How far GELU under the engine is from GELU in the clear, by form: what `nas.private --gelu` says of it."""

import numpy as np
import pytest

from costmodel import ops
from costmodel.engine import spu
from costmodel.execution import interpreter
from costmodel.ops import GeluForm, Node, OpGraph
from costmodel.protocols.primitives import EngineSetting

NUM_INPUTS = 361
INPUTS = np.linspace(-18.0, 18.0, NUM_INPUTS)
FORMS: tuple[GeluForm, ...] = ("tanh", "exact", "piecewise")


def all_forms() -> OpGraph:
    """One token, whose features are the inputs; the outputs of every form, side by side."""
    embed = Node(
        name="embed",
        layer="embed",
        op=ops.TokenEmbedding(tokens=1, vocab=1, features=NUM_INPUTS),
        inputs=("tokens",),
    )
    gelus = [
        Node(name=form, layer=0, op=ops.Gelu(rows=1, features=NUM_INPUTS, form=form), inputs=("embed",))
        for form in FORMS
    ]
    joined = ops.JoinColumns(rows=1, features=len(FORMS) * NUM_INPUTS, part=NUM_INPUTS)
    return OpGraph(nodes=(embed, *gelus, Node(name="all", layer=0, op=joined, inputs=FORMS)))


@pytest.mark.needs_engine
def test_the_engine_is_far_from_tanh_and_near_the_other_forms() -> None:
    graph, weights, tokens = all_forms(), {"embed.weight": INPUTS[None]}, np.array([0])
    run = spu.run(graph, weights, tokens, protocol="semi2k", setting=EngineSetting())
    errors = np.abs(run.logits - interpreter.execute(graph, weights, tokens)).reshape(len(FORMS), NUM_INPUTS)
    tanh, exact, piecewise = errors
    near = np.abs(INPUTS) <= 5
    assert 0.004 < tanh[near].max() < 0.01
    assert 0.02 < tanh.max() < 0.03
    assert tanh[~near] == pytest.approx(0.00135 * np.abs(INPUTS[~near]), rel=0.05)
    assert exact.max() < 0.001
    assert piecewise.max() < 0.0001
