"""The space of a parent's own layers and their cheaper replacements, which needs no file."""

from search_spaces.architecture import Architecture
from search_spaces.bases import OWN
from search_spaces.forms import FFNS, Attention, Ffn, Norm
from search_spaces.inner import inner_choices
from search_spaces.space import Choices, Definition, SearchSpace, build_space

FORMS: tuple[Attention, ...] = ("softmax", "bounded", "power8", "softmax-half", "none")
LINEAR: tuple[Ffn, ...] = ("fused", "none")


def own_space(parent: Architecture) -> SearchSpace:
    """Build the space with choices for every layer: the parent's own first layer and cheaper replacements."""
    layer = parent.layers[0]
    parents = FFNS[layer.ffn].is_gated
    activations = [ffn for ffn, form in FFNS.items() if form.replaces and form.is_gated == parents]
    choices = Choices(
        norm1=_norms(layer.norm1),
        attention=FORMS,
        norm2=_norms(layer.norm2),
        ffn=tuple(dict.fromkeys((layer.ffn, *activations, *LINEAR))),
        stabiliser=("none",),
        **inner_choices(parent),
    )
    return build_space(Definition(name=OWN, base=OWN, choices=choices), parent)


def _norms(norm: Norm) -> tuple[Norm, ...]:
    frozen: Norm = "frozen-rmsnorm" if norm.endswith("rmsnorm") else "frozen-layernorm"
    return tuple(dict.fromkeys((norm, frozen, "none"))) if norm != "none" else ("none",)
