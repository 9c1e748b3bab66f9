import pytest

from costmodel.cost import Price
from costmodel.errors import UnpricedOpError
from costmodel.ops import Op, RmsNorm, Softmax
from costmodel.protocols import load_pricer
from search_spaces.bases import Dimensions
from search_spaces.budget.priceable import priceable
from search_spaces.budget.priced_space import price_space
from search_spaces.definition import SHIPPED, Choices, Definition
from search_spaces.space import SearchSpace, build_space, load_space
from search_spaces.workload import Workload

SPACES = {name: load_space(name) for name in SHIPPED}
WORK = Workload(prompt_len=8)
NO_ROW = "protocol published has no formula for {}, which no printed row has; choose protocol semi2k, aby3 or cheetah."
NO_FORM = "protocol published prices {} only, but got {!r}; choose protocol semi2k, aby3 or cheetah."


def space_of(**choices: tuple[str, ...]) -> SearchSpace:
    plain = {"norm1": ("none",), "attention": ("softmax",), "norm2": ("none",), "ffn": ("relu",)}
    definition = Definition(
        name="own",
        base="tiny",
        dimensions=Dimensions(layers=2),
        choices=Choices(**{**plain, "stabiliser": ("none",), **choices}),  # type: ignore[arg-type]
    )
    return build_space(definition)


def test_what_the_printed_rows_lack_leaves_the_space_of_forms():
    space, left_out = priceable(SPACES["gpt2-forms"], load_pricer(), WORK)
    assert left_out == {
        "norm1 rmsnorm": NO_ROW.format("RmsNorm"),
        "attention 2quad": NO_FORM.format("Softmax with `form` exact", "2quad"),
        "attention relu": NO_FORM.format("Softmax with `form` exact", "relu"),
        "norm2 rmsnorm": NO_ROW.format("RmsNorm"),
        "ffn gelu-piecewise": NO_FORM.format("Gelu with `form` tanh or exact", "piecewise"),
        "ffn square": NO_ROW.format("Square"),
    }
    choices = space.definition.choices
    assert (choices.norm1, choices.attention) == (("layernorm", "none"), ("softmax", "none"))
    assert (choices.norm2, choices.ffn) == (("layernorm", "none"), ("gelu", "relu", "none"))
    price_space(space, load_pricer(), WORK)  # all of it


@pytest.mark.parametrize("cost_of", ["folded", "unfolded"])
def test_a_space_that_lists_its_members_is_left_as_it_is(cost_of, pricer):
    """Its members are what was asked for: pricing it says what is missing. So is a space all of which has a price.

    A frozen norm has no printed row: folding leaves nothing of it, and as written `published` takes it as folded.
    """
    definition = Definition(name="squares", base="tiny", members=("SM+SQ", "SM+R"))
    for space in (SPACES["ladder"], SPACES["gpt2-small"], build_space(definition)):
        assert priceable(space, load_pricer(), WORK, cost_of) == (space, {})
    for name in ("gpt2-papers", "gpt2-small", "tiny"):
        assert priceable(SPACES[name], pricer, WORK, cost_of)[0] is SPACES[name]
    with pytest.raises(UnpricedOpError, match="no formula for Square"):
        price_space(build_space(definition), load_pricer(), WORK)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"ffn": ("square", "gelu-piecewise")},
            "a choice of ffn .* got square, gelu-piecewise: .* no formula for Square",
        ),
        ({"attention": ("2quad", "relu")}, "a choice of attention .* got 2quad, relu: .* prices Softmax"),
        ({"norm1": ("rmsnorm",)}, "a choice of norm1 .* got rmsnorm: .* no formula for RmsNorm"),
    ],
)
def test_a_kind_without_any_price_is_refused_by_name(choices, message):
    with pytest.raises(ValueError, match=f"space 'own' must have {message}"):
        priceable(space_of(**choices), load_pricer(), WORK)


def test_a_choice_leaves_for_its_own_sake_alone(pricer):
    """Without a price for softmax, attention leaves; norms before it stay."""

    class NoSoftmax(type(pricer)):  # type: ignore[misc]
        def price(self, op: Op) -> Price:
            if isinstance(op, (Softmax, RmsNorm)):
                raise UnpricedOpError(f"no {type(op).__name__}.")
            return super().price(op)

    space = space_of(norm1=("layernorm",), attention=("softmax", "softmax-half", "none"), norm2=("rmsnorm", "none"))
    _, left_out = priceable(space, NoSoftmax(), WORK)
    assert left_out == {
        "attention softmax": "no Softmax.",
        "attention softmax-half": "no Softmax.",
        "norm2 rmsnorm": "no RmsNorm.",
    }
