"""The kinds of norm, attention, FFN, stabiliser and inner norms that a layer can choose from, with the facts of each.

To add an FFN whose activation is a known op, add its name to `Ffn` and its record to `FFNS`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

from costmodel import ops
from costmodel.ops import GeluForm, Op, SoftmaxForm

Norm = Literal["layernorm", "rmsnorm", "frozen-layernorm", "frozen-rmsnorm", "none"]
Attention = Literal["softmax", "softmax-temperature", "softmax-half", "2quad", "power8", "relu", "bounded", "none"]
Ffn = Literal[
    "gelu", "gelu-exact", "gelu-piecewise", "relu", "squared-relu", "leaky-relu", "square", "identity",
    "fused", "swiglu", "geglu", "reglu", "quadglu", "bilinear", "none",
]  # fmt: skip
Stabiliser = Literal["none", "scaled"]
Inner = Literal["own", "uncapped", "frozen", "none"]


class NormForm(NamedTuple):
    """A kind of norm.

    letter: its letter in layer codes.
    label: its name in reports.
    name: its name in the papers, after a `+`; empty for no norm.
    rank: its place, from 0, in the order none, frozen RMSNorm, frozen LayerNorm, RMSNorm, LayerNorm; the final norm
        that layers imply (`default_final_norm`) depends on the highest rank in them.
    is_centred: whether it subtracts the mean, and has a bias.
    """

    letter: str
    label: str
    name: str
    rank: int
    is_centred: bool = False

    @property
    def is_frozen(self) -> bool:
        """Whether the norm's deviation becomes a constant in training, so that the norm is linear from then on."""
        return self.name.startswith("f")

    @property
    def is_live(self) -> bool:
        """Whether the norm still depends on the data after folding: true of all but frozen norms and `none`."""
        return bool(self.name) and not self.is_frozen


class AttentionForm(NamedTuple):
    """A kind of attention.

    letter, label: its letter in layer codes, and its name in reports. name: its name in the papers; empty without one.
    softmax: form of its softmax; None for the architecture's `softmax`.
    """

    letter: str
    label: str
    name: str = ""
    softmax: SoftmaxForm | None = None


class FfnForm(NamedTuple):
    """A kind of FFN.

    letter: its letter in layer codes.
    label: its name in reports.
    name: its name in the papers, after a `+`; empty if it has none.
    activation: function that makes the op of its activation from `rows`, `features` and, for GELU, `form`; None
        without activation.
    then: function that makes a second op, applied to the activation's output, from `rows` and `features`; or None.
    gelu: form of its GELU; `own` for the architecture's `gelu`, None if it has no GELU.
    is_gated: whether the outputs of two linears are multiplied, one of them after the activation, if there is one.
    degree: degree of the fitted polynomials, one per channel, by which it can replace a parent's activation; or None.
    is_linear: whether it has no nonlinearity, so that it can be folded.
    replaces: whether the space `parent` offers it to parents whose FFN has the same `is_gated`.
    """

    letter: str
    label: str
    name: str = ""
    activation: Callable[..., Op] | None = None
    then: Callable[..., Op] | None = None
    gelu: GeluForm | Literal["own"] | None = None
    is_gated: bool = False
    degree: int | None = None
    is_linear: bool = False
    replaces: bool = False


class InnerForm(NamedTuple):
    """What a layer keeps of the block's inner norms (of queries and keys, and after a sub-layer) and of the score cap.

    letter: its letter in layer codes.
    norm: the kind of the inner norms, where the block has them; `none` if they are folded.
    is_capped: whether scores keep the architecture's cap.
    """

    letter: str
    norm: Norm
    is_capped: bool = False


NORMS: dict[Norm, NormForm] = {
    "layernorm": NormForm("L", "LayerNorm", "LN", rank=4, is_centred=True),
    "rmsnorm": NormForm("M", "RMSNorm", "RMS", rank=3),
    "frozen-layernorm": NormForm("l", "frozen LayerNorm", "fLN", rank=2, is_centred=True),
    "frozen-rmsnorm": NormForm("m", "frozen RMSNorm", "fRMS", rank=1),
    "none": NormForm("o", "no norm", "", rank=0),
}
ATTENTIONS: dict[Attention, AttentionForm] = {
    "softmax": AttentionForm("S", "softmax attention", "SM"),
    "softmax-temperature": AttentionForm("T", "softmax attention with a temperature", "SM(t)"),
    "softmax-half": AttentionForm("H", "softmax attention with half of the heads"),
    "2quad": AttentionForm("Q", "2Quad attention", softmax="2quad"),
    "power8": AttentionForm("P", "attention by eighth powers", softmax="power8"),
    "relu": AttentionForm("U", "ReLU attention", softmax="relu"),
    "bounded": AttentionForm("B", "softmax attention with a bound", softmax="bounded"),
    "none": AttentionForm("o", "no attention"),
}
FFNS: dict[Ffn, FfnForm] = {
    "gelu": FfnForm("G", "GELU FFN", "G", activation=ops.Gelu, gelu="own"),
    "gelu-exact": FfnForm("E", "exact GELU FFN", activation=ops.Gelu, gelu="exact"),
    "gelu-piecewise": FfnForm("P", "piecewise GELU FFN", activation=ops.Gelu, gelu="piecewise"),
    "relu": FfnForm("R", "ReLU FFN", "R", activation=ops.Relu, replaces=True),
    # So et al. 2021, Primer, arXiv 2109.08668
    "squared-relu": FfnForm("D", "squared ReLU FFN", "SqR", activation=ops.Relu, then=ops.Square),
    "leaky-relu": FfnForm("K", "leaky ReLU FFN", "LR", activation=ops.LeakyRelu),
    "square": FfnForm("X", "square FFN", "SQ", activation=ops.Square, degree=2, replaces=True),
    "identity": FfnForm("I", "linear FFN", is_linear=True),
    "fused": FfnForm("F", "fused linear FFN", is_linear=True),
    "swiglu": FfnForm("W", "SwiGLU FFN", "SwiGLU", activation=ops.Silu, is_gated=True),
    "geglu": FfnForm("A", "GeGLU FFN", "GeGLU", activation=ops.Gelu, gelu="own", is_gated=True),
    "reglu": FfnForm("V", "ReGLU FFN", "ReGLU", activation=ops.Relu, is_gated=True),
    "quadglu": FfnForm(
        "Q", "QuadGLU FFN", "QuadGLU", partial(ops.Square, shift=-1.0), is_gated=True, degree=2, replaces=True
    ),
    "bilinear": FfnForm("B", "bilinear FFN", "Bilinear", is_gated=True, degree=1),
    "none": FfnForm("o", "no FFN"),
}
INNERS: dict[Inner, InnerForm] = {
    "own": InnerForm("o", "rmsnorm", is_capped=True),
    "uncapped": InnerForm("u", "rmsnorm"),
    "frozen": InnerForm("f", "frozen-rmsnorm"),
    "none": InnerForm("n", "none"),
}
STABILISERS: dict[Stabiliser, str] = {"scaled": "s", "none": "o"}  # name -> layer code

OF_FEWER_HEADS: tuple[Attention, ...] = ("none", "softmax-half")  # without some or all heads
FROZEN_NORMS = tuple(norm for norm, form in NORMS.items() if form.is_frozen)
LIVE_NORMS = tuple(norm for norm, form in NORMS.items() if form.is_live)
CENTRED_NORMS = tuple(norm for norm, form in NORMS.items() if form.is_centred)
POLYNOMIALS: Mapping[str, int] = {ffn: form.degree for ffn, form in FFNS.items() if form.degree is not None}
POLYNOMIAL_GATES: Mapping[str, int] = {
    ffn: form.degree for ffn, form in FFNS.items() if form.degree is not None and form.is_gated
}
LINEAR_FFNS = tuple(ffn for ffn, form in FFNS.items() if form.is_linear)
