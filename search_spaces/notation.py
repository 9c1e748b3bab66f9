"""Names of architectures: those that the papers use and, for every other architecture, layer codes.

    EReg(...)                 trained with the entropy regulariser (a recipe, not an architecture)
    HH(...)                   He and Hofmann's simplified (`sas`) block
    SM or SM(t)               softmax attention, optionally with a learned temperature
    +LN +RMS +fLN +fRMS       LayerNorm or RMSNorm before attention and before the FFN; with `f`, the norm's deviation
                              becomes a constant during training
    +G +R +SqR +LR +SQ        FFN with GELU, ReLU, squared ReLU, leaky ReLU, square; if a name states no FFN, its FFN
                              has no activation
    +SwiGLU +GeGLU +ReGLU +QuadGLU +Bilinear
                              gated FFN: two linears multiplied, one of them through SiLU, GELU, ReLU, x^2 - 1 or
                              nothing
    +ScFFN +ScFuFFN           FFN of two linears without activation, or of one linear, with the stabiliser `scaled`
    _i6                       the FFN of the 6 deepest layers removed
    6xLSLGo-6xoSoFs           layer codes of five letters a layer (norm1, attention, norm2, FFN, stabiliser), repeated
                              up to the number of layers; `search_spaces/forms.py` has the letters
    6xMSMWofo                 two more letters (inner1, inner2) for a layer that changes the inner norms of its block
                              or drops the score cap
    12xLSLRo-l                a last group of one letter is the final norm; without this group it is the norm that the
                              layers imply (`default_final_norm`), or none in HH(...)

Source: arXiv 2410.13060 table 3 and arXiv 2501.03489 table 2 for the names.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any

from costmodel.errors import UserError
from search_spaces.architecture import Architecture, Layer, default_final_norm, least_rank
from search_spaces.block import BLOCKS, WRAPPERS
from search_spaces.deployed import with_folded_settings
from search_spaces.forms import ATTENTIONS, FFNS, INNERS, NORMS, STABILISERS, Attention, Ffn, Norm, Stabiliser
from search_spaces.inner import implied_logit_cap

NORM_LETTERS = {norm: form.letter for norm, form in NORMS.items()}
ATTENTION_LETTERS = {attention: form.letter for attention, form in ATTENTIONS.items()}
FFN_LETTERS = {ffn: form.letter for ffn, form in FFNS.items()}
INNER_LETTERS = {inner: form.letter for inner, form in INNERS.items()}
LETTERS: dict[str, Mapping[Any, str]] = {  # field of `Layer` -> letter of each value, in the order of a layer code
    "norm1": NORM_LETTERS,
    "attention": ATTENTION_LETTERS,
    "norm2": NORM_LETTERS,
    "ffn": FFN_LETTERS,
    "stabiliser": STABILISERS,
    "inner1": INNER_LETTERS,
    "inner2": INNER_LETTERS,
}
USUAL = 5  # number of letters for a layer that keeps all inner norms and the score cap of its block

FFN_NAMES: dict[str, tuple[Ffn, Stabiliser]] = {
    "": ("identity", "none"),  # first, so that 12 layers without FFN are named SM_i12, not SM+ScFFN_i12
    **{f"+{form.name}": (ffn, "none") for ffn, form in FFNS.items() if form.name},
    "+ScFFN": ("identity", "scaled"),
    "+ScFuFFN": ("fused", "scaled"),
}
NORM_NAMES: dict[str, Norm] = {form.name and f"+{form.name}": norm for norm, form in reversed(NORMS.items())}
ATTENTION_NAMES: dict[str, Attention] = {form.name: name for name, form in ATTENTIONS.items() if form.name}
NAMED_LAYERS: dict[str, Layer] = {
    attention + norm + ffn: Layer(
        norm1=NORM_NAMES[norm],
        attention=ATTENTION_NAMES[attention],
        norm2=NORM_NAMES[norm],
        ffn=FFN_NAMES[ffn][0],
        stabiliser=FFN_NAMES[ffn][1],
    )
    for attention, norm, ffn in product(ATTENTION_NAMES, NORM_NAMES, FFN_NAMES)
}
_CHOICES = {part: {letter: choice for choice, letter in letters.items()} for part, letters in LETTERS.items()}
_NAME = re.compile(r"(?P<layer>.+?)(?:_i(?P<pruned>[0-9]{1,4}))?")
_GROUP = re.compile(r"(?:(?P<count>[0-9]{1,4})x)?(?P<letters>[A-Za-z]{5}(?:[A-Za-z]{2})?)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """What a name stands for: an architecture, and whether it is trained with the entropy regulariser."""

    architecture: Architecture
    entropy_regularised: bool

    @property
    def name(self) -> str:
        """The name from the papers, or layer codes if the papers have no name for it (`name_of`)."""
        return name_of(self.architecture, entropy_regularised=self.entropy_regularised)


def parse(text: str, base: Architecture) -> Member:
    """Return the architecture that a name describes, and whether the name asks for the entropy regulariser.

    The name sets the layers, the final norm and, if it is `HH(...)`, the block. All else is as in `base`, except that
    the logit cap is dropped if `base` has a score cap and no layer keeps it.

    Raises UserError for a name outside the grammar, `_i6` in a model of fewer than 6 layers, layer codes whose number
    does not divide the number of layers of `base`, or choices that `Layer` or `Architecture` refuses.
    """
    inner, entropy_regularised = _unwrap(text, "EReg")
    block, wrapped = base.block, False
    for wrapper, its_block in WRAPPERS.items():
        inner, is_its = _unwrap(inner, wrapper)
        block, wrapped = (its_block, True) if is_its else (block, wrapped)
    inner, final_norm = _final_norm(inner)
    if (match := _NAME.fullmatch(inner)) and match["layer"] in NAMED_LAYERS:
        first_norm, pruned = BLOCKS[block].first_norm if wrapped else None, int(match["pruned"] or 0)
        layers = _named_layers(text, NAMED_LAYERS[match["layer"]], pruned, base.num_layers, first_norm)
    elif groups := _groups(inner):
        layers = _placed(text, groups, base.num_layers)
    else:
        raise UserError(
            f"architecture must be a name like SM+LN+G, SM+ScFuFFN_i6, EReg(SM(t)+ScFuFFN) or HH(SM+ScFFN), "
            f"a placement like 6xLSLGo-6xoSoFs, or the path of a .yaml file, but got {text!r:.80}."
        )
    architecture = replace(base, layers=layers, block=block, logit_cap=implied_logit_cap(base, layers))
    architecture = replace(architecture, final_norm=final_norm or _implied_final_norm(architecture))
    return Member(architecture=architecture, entropy_regularised=entropy_regularised)


def parse_deployed(text: str, base: Architecture) -> Architecture:
    """Return an architecture that is folded already, with the layers and final norm of the layer codes `text`.

    All else is as in the folded form of `base`, but the logit cap is dropped as by `parse`. If `text` and `base` differ
    in their number of layers, all layers have the first kind of positions. Raises UserError for text other than
    layer codes, such as a name from the papers, and for choices that `Layer` or `Architecture` refuses.
    """
    num_layers = sum(count for count, _ in _groups(_final_norm(text)[0]))
    if not num_layers:
        raise UserError(f"a folded architecture must be a placement like 6xLSLGo-6xoSoFs, but got {text!r:.80}.")
    places = base.layer_positions if num_layers == base.num_layers else ()
    sized = replace(base, layers=base.layers[:1] * num_layers, layer_positions=places)
    return with_folded_settings(parse(text, sized).architecture)


def name_of(architecture: Architecture, *, entropy_regularised: bool = False) -> str:
    """Return the name from the papers if there is one, else layer codes; `parse` reads it back with the same base."""
    text = _paper_name(architecture) or placement(architecture)
    if wrapper := architecture.block_facts.wrapper:
        text = f"{wrapper}({text})"
    return f"EReg({text})" if entropy_regularised else text


def placement(architecture: Architecture) -> str:
    """Return the layer codes, one group for equal neighbours, and the final norm's letter where `parse` needs it.

    `parse`, or `parse_deployed` for a folded architecture, reads them back with the same base.
    """
    words = ("".join(table[getattr(layer, kind)] for kind, table in LETTERS.items()) for layer in architecture.layers)
    words = (word[:USUAL] if word[USUAL:] == "oo" else word for word in words)
    groups = [f"{len(list(run))}x{letters}" for letters, run in groupby(words)]
    if architecture.final_norm != _implied_final_norm(architecture):
        groups.append(NORM_LETTERS[architecture.final_norm])
    return "-".join(groups)


def _implied_final_norm(architecture: Architecture) -> Norm:
    block = architecture.block_facts
    return default_final_norm(architecture.layers, least_rank(block)) if block.keeps_final_norm else "none"


def _final_norm(text: str) -> tuple[str, Norm | None]:
    """Split a name into the layers and the final norm; the norm is None if the name states none."""
    rest, _, letter = text.rpartition("-")
    norm = next((norm for norm, its_letter in NORM_LETTERS.items() if its_letter == letter), None)
    return (rest, norm) if rest and norm else (text, None)


def _unwrap(text: str, wrapper: str) -> tuple[str, bool]:
    if text.startswith(f"{wrapper}(") and text.endswith(")"):
        return text[len(wrapper) + 1 : -1], True
    return text, False


def _named_layers(text: str, kept: Layer, pruned: int, num_layers: int, first_norm: Norm | None) -> tuple[Layer, ...]:
    if pruned > num_layers:
        raise UserError(
            f"`_i{pruned}` of {text!r} removes more FFNs than there are layers ({num_layers}); "
            f"use a number from 0 to {num_layers}."
        )
    removed = replace(kept, norm2="none", ffn="none", stabiliser="none")
    layers = (kept,) * (num_layers - pruned) + (removed,) * pruned
    return layers if first_norm is None else (replace(layers[0], norm1=first_norm), *layers[1:])


def _groups(text: str) -> list[tuple[int, str]]:
    """Return count and letters of every group of a placement; empty if the text is no placement."""
    matches = [_GROUP.fullmatch(group) for group in text.split("-")]
    return [(int(match["count"] or 1), match["letters"]) for match in matches if match] if all(matches) else []


def _placed(text: str, groups: list[tuple[int, str]], num_layers: int) -> tuple[Layer, ...]:
    """Return the layers of a placement's groups, repeated up to `num_layers`."""
    length = sum(count for count, _ in groups)
    if min(count for count, _ in groups) < 1 or length > num_layers or num_layers % length:
        raise UserError(
            f"placement {text!r:.80} has groups of {', '.join(str(count) for count, _ in groups):.40} layers, which do "
            f"not tile the model's {num_layers} layers; every group needs at least one, and their sum must divide it."
        )
    pattern: list[Layer] = []
    for count, letters in groups:
        for position, (letter, choices) in enumerate(zip(letters, _CHOICES.values(), strict=False), 1):
            if letter not in choices:
                raise UserError(
                    f"letter {position} of {letters!r} in {text!r:.80} must be one of {''.join(choices)}, "
                    f"but got {letter!r}."
                )
        chosen = {kind: choices[letter] for letter, (kind, choices) in zip(letters, _CHOICES.items(), strict=False)}
        pattern += [Layer(**chosen)] * count
    return tuple(pattern) * (num_layers // length)


def _paper_name(architecture: Architecture) -> str | None:
    """Return the papers' name that parses to these layers, or None."""
    if architecture.final_norm != _implied_final_norm(architecture):
        return None
    pruned = sum(layer.ffn == "none" for layer in architecture.layers)
    suffix = f"_i{pruned}" if pruned else ""
    first_norm = architecture.block_facts.first_norm if architecture.block_facts.wrapper else None
    for name, kept in NAMED_LAYERS.items():
        if _named_layers(name, kept, pruned, architecture.num_layers, first_norm) == architecture.layers:
            return f"{name}{suffix}"
    return None
