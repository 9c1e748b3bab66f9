"""A layer map of an architecture: letters and words for the norms, attention and FFN of each layer."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from search_spaces.architecture import Architecture, Layer
from search_spaces.budget.priced_space import CostForm
from search_spaces.deployed import deployed, deployed_layer, regions
from search_spaces.forms import ATTENTIONS, FFNS, FROZEN_NORMS, LIVE_NORMS, NORMS, AttentionForm, FfnForm
from search_spaces.inner import inner_norms

Choice = TypeVar("Choice", bound=str)

Status = Literal["kept", "folds", "absent"]

ABSENT = "·"


class Cell(NamedTuple):
    """The norms, attention or FFN of one layer. kind: name of its form. status: whether it folds away or is absent."""

    letter: str
    kind: str
    words: str
    status: Status


class LayerCells(NamedTuple):
    """A column of a layer map, for one layer. norm: both norms of the layer."""

    norm: Cell
    attention: Cell
    ffn: Cell


def layer_map(architecture: Architecture, cost_of: CostForm) -> tuple[LayerCells, ...]:
    """Return a column for each layer of an architecture. If costs are folded costs, what folds away is marked so."""
    if cost_of == "unfolded" or architecture.folded:
        left = architecture.layers
    else:
        left = tuple(
            deployed_layer(architecture, layer, region, keeps_norm1=architecture.block_facts.passes_values(index))
            for index, (layer, region) in enumerate(zip(architecture.layers, regions(architecture), strict=True))
        )
    return tuple(
        LayerCells(
            norm=_norms(layer, remains),
            attention=_cell(layer.attention, remains.attention, ATTENTIONS),
            ffn=_cell(layer.ffn, remains.ffn, FFNS),
        )
        for layer, remains in zip(architecture.layers, left, strict=True)
    )


def legend(maps: Iterable[Sequence[LayerCells]]) -> list[tuple[str, Cell]]:
    """Return the distinct cells of layer maps, except absent ones, each with its part: `norm`, `attention` or `ffn`."""
    columns = [column for layers in maps for column in layers]
    cells = ((part, cell) for part in LayerCells._fields for column in columns for cell in [getattr(column, part)])
    return list(dict.fromkeys((part, cell) for part, cell in cells if cell.status != "absent"))


def kept_words(architecture: Architecture, cost_of: CostForm) -> str:
    """Return in how many layers each part is kept, such as `attention in 10 of 12 layers, no FFN, LayerNorm in 9`."""
    columns, whole = layer_map(architecture, cost_of), architecture.num_layers
    form = deployed(architecture) if cost_of == "folded" else architecture
    inner = sum(not {*LIVE_NORMS}.isdisjoint(inner_norms(form, layer).values()) for layer in form.layers)
    attention = [column.attention for column in columns if column.attention.status == "kept"]
    ffns = Counter(column.ffn.words for column in columns if column.ffn.status == "kept")
    norms = Counter(column.norm.words for column in columns if column.norm.status == "kept")
    others = Counter(cell.words for cell in attention if cell.kind != "softmax")
    named = ", ".join(f"{count} of them {words.removeprefix('softmax attention ')}" for words, count in others.items())
    forms = f" ({named})" if named else ""
    folds = any(column.norm.status == "folds" for column in columns)
    parts = [
        f"attention in {len(attention)} of {whole} layers{forms}" if attention else "no attention",
        *(f"{words} in {count}" for words, count in ffns.most_common()),
        *([] if ffns else ["no FFN"]),
        *(f"{words} in {count}" for words, count in norms.most_common()),
        *([] if norms else ["no norm in any layer" + " once frozen ones are folded" * folds]),
        *([f"norms inside sub-layers in {inner}"] if inner else []),
        *([] if form.final_norm == "none" else [f"final {NORMS[form.final_norm].label}"]),
    ]
    return ", ".join(parts)


def _cell(choice: Choice, left: Choice, forms: Mapping[Choice, AttentionForm | FfnForm]) -> Cell:
    form = forms[choice]
    if choice == "none":
        return Cell(ABSENT, "none", form.label, "absent")
    if left == "none":
        return Cell(form.letter, choice, f"{form.label}, which folds away", "folds")
    return Cell(form.letter, choice, form.label, "kept")


def _norms(layer: Layer, left: Layer) -> Cell:
    """Return both norms as one cell, with one letter if they are equal or only one sub-layer exists."""
    pair = [(layer.norm1, left.norm1)] * (layer.attention != "none")
    pair += [(layer.norm2, left.norm2)] * (layer.ffn != "none")
    had = list(dict.fromkeys(norm for norm, _ in pair))
    if all(norm == "none" for norm in had):
        return Cell(ABSENT, "none", NORMS["none"].label, "absent")
    letters = "".join(NORMS[norm].letter if norm != "none" else ABSENT for norm in had)
    words = " and ".join(NORMS[norm].label for norm in had)
    live = [norm for norm in had if norm != "none" and norm not in FROZEN_NORMS]
    kind = (live or [norm for norm in had if norm != "none"])[0]
    if all(remains == "none" for _, remains in pair):
        return Cell(letters, kind, f"{words}, folds away", "folds")
    return Cell(letters, kind, words, "kept")
