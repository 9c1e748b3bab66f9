import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import strategies as st

from costmodel import ops
from costmodel.cost import Price
from costmodel.estimate import Pricer
from costmodel.ops import Op
from costmodel.protocols import TRUST
from search_spaces.architecture import Layer
from search_spaces.bases import Dimensions
from search_spaces.forms import Attention, Ffn, Norm
from search_spaces.graph import ConstraintName
from search_spaces.space import Choices, Definition, SearchSpace, build_space

SECONDS = {ops.LayerNorm: 2.0, ops.Softmax: 3.0, ops.Gelu: 5.0, ops.Relu: 1.0, ops.LeakyRelu: 1.0}
SECONDS |= {ops.TokenEmbedding: 7.0, ops.VocabProjection: 11.0}
BYTES = {ops.LayerNorm: 300.0, ops.Gelu: 200.0, ops.Relu: 1000.0, ops.VocabProjection: 500.0}


class RoundPricer(Pricer):
    """Seconds and bytes per op whatever its shape, so that totals can be written out; bytes rank ops differently."""

    protocol = "round"
    network = None
    cost_model_id = "0"
    range_over = "nothing"
    trust = TRUST["published"]

    def price(self, op: Op) -> Price:
        return Price(latency_s=SECONDS.get(type(op), 0.0), sent_bytes=BYTES.get(type(op), 0.0))


@pytest.fixture(scope="session")
def pricer() -> RoundPricer:
    return RoundPricer()


class SizePricer(RoundPricer):
    """Prices every op by its shape: a second per product of its dimensions, more with a bias or gain, none if local."""

    protocol = "size"

    def price(self, op: Op) -> Price:
        values = [getattr(op, field.name) for field in fields(op)]
        flags = sum(value is True for value in values)
        work = math.prod(value for value in values if type(value) is int and value > 0) * (1 + flags)
        local = isinstance(
            op, (ops.PositionEmbedding, ops.KeyValueCache, ops.Add, ops.TakeRows, ops.JoinRows, ops.JoinColumns)
        )
        return Price(latency_s=0.0 if local else float(work), sent_bytes=0.0 if local else 3.0)


@st.composite
def drawn_layers(draw: st.DrawFn, norms: Sequence[Norm], attentions: Sequence[Attention], ffns: Sequence[Ffn]) -> Layer:
    """Layers of these choices; where attention or FFN is removed, its norm and stabiliser are too."""
    attention, ffn = draw(st.sampled_from(attentions)), draw(st.sampled_from(ffns))
    return Layer(
        norm1="none" if attention == "none" else draw(st.sampled_from(norms)),
        attention=attention,
        norm2="none" if ffn == "none" else draw(st.sampled_from(norms)),
        ffn=ffn,
        stabiliser="none" if ffn == "none" else draw(st.sampled_from(("none", "scaled"))),
    )


@pytest.fixture(scope="session")
def sizes() -> SizePricer:
    return SizePricer()


@pytest.fixture(scope="session")
def make_space() -> Callable[..., SearchSpace]:
    """Ten choices a layer on the tiny base: enough to tell paths apart, few enough to enumerate."""

    def make(*constraints: ConstraintName, num_layers: int = 3) -> SearchSpace:
        norms: Any = ("layernorm", "none")
        ffns: Any = ("gelu", "relu", "none")
        choices = Choices(norm1=norms, attention=("softmax",), norm2=norms, ffn=ffns, stabiliser=("none",))
        dimensions = Dimensions(layers=num_layers)
        return build_space(
            Definition(name="small", base="tiny", dimensions=dimensions, choices=choices, constraints=constraints)
        )

    return make


@pytest.fixture(scope="session", params=[(), ("ffn-removed-only-in-deepest-suffix",)], ids=["free", "constrained"])
def small_space(request: pytest.FixtureRequest, make_space: Callable[..., SearchSpace]) -> SearchSpace:
    return make_space(*request.param)
