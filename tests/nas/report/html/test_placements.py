from dataclasses import replace

import pytest

from nas.report.html.placements import kept_words, layer_map, legend
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.notation import parse

BASE = base_architecture("gpt2-small")


def columns(name: str, cost_of="folded"):
    return layer_map(parse(name, BASE).architecture, cost_of)


def test_what_is_kept_folds_or_is_not_there():
    first, last = columns("6xlHlRo-6xooooo")[0], columns("6xlHlRo-6xooooo")[-1]
    assert [(cell.letter, cell.kind, cell.status) for cell in first] == [
        ("l", "frozen-layernorm", "folds"),
        ("H", "softmax-half", "kept"),
        ("R", "relu", "kept"),
    ]
    assert [(cell.letter, cell.status) for cell in last] == [("·", "absent")] * 3
    assert first.norm.words == "frozen LayerNorm, folds away"


def test_two_norms_of_a_layer_share_a_cell():
    assert [column.norm.letter for column in columns("6xLSoRo-6xLSLRo")][5:7] == ["L·", "L"]
    assert columns("12xlSLRo")[0].norm == ("lL", "layernorm", "frozen LayerNorm and LayerNorm", "kept")


def test_a_legend_has_what_there_is_once_norms_first():
    entries = legend([columns("6xLSoRo-6xooooo"), columns("12xLPLRo")])
    assert [(part, cell.letter) for part, cell in entries] == [
        ("norm", "L·"), ("norm", "L"), ("attention", "S"), ("attention", "P"), ("ffn", "R"),
    ]  # fmt: skip


def test_linear_ffns_fold_unless_prices_are_as_written():
    assert columns("SM+ScFuFFN")[3].ffn.status == "folds"
    assert columns("SM+ScFuFFN", "unfolded")[3].ffn.status == "kept"
    assert columns("12xLSLFs")[11].ffn.status == "kept"  # a live norm is on either side


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "10xlSlRo-2xooooo",
            "attention in 10 of 12 layers, ReLU FFN in 10, no norm in any layer once frozen ones are folded",
        ),
        ("SM_i12", "attention in 12 of 12 layers, no FFN, no norm in any layer"),
        ("SM+LN+G", "attention in 12 of 12 layers, GELU FFN in 12, LayerNorm in 12, final LayerNorm"),
        (
            "4xoSoRo-8xoHooo-L",
            "attention in 12 of 12 layers (8 of them with half of the heads), ReLU FFN in 4, "
            "no norm in any layer, final LayerNorm",
        ),
    ],
)
def test_what_is_left_is_counted(name, words):
    assert kept_words(parse(name, BASE).architecture, "folded") == words


def test_norms_inside_sub_layers_are_counted_unless_they_fold():
    base = base_architecture("smollm2-135m", Dimensions(layers=3))
    placed = parse("1xMSMWo-1xMSMWofo-1xooMWo", replace(base, block="qwen3")).architecture
    words = "attention in 2 of 3 layers, SwiGLU FFN in 3, RMSNorm in 3, norms inside sub-layers in 1, final RMSNorm"
    assert kept_words(placed, "folded") == words
