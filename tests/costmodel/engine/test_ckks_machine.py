"""Tests of ckks under a library: counts equal those by formula, and logits those in plaintext."""

import sys

import pytest

from costmodel.engine.ckks_library import PACKAGE, SECONDS_BAR, STATED_ERROR, Library, compare
from costmodel.errors import UserError
from costmodel.pricing.model_spec import ModelOptions, resolve_model

BLOCK = {"layers": 1, "vocab": 16, "softmax": "power8"}
# a small ring has no bootstraps; the model that has one takes minutes
CASES = {
    "grouped heads, rotary": dict(base="smollm2-135m", heads=6, d_model=24, seq_len=6, **BLOCK),
    "more tokens than a head has columns": dict(base="gpt2-small", heads=4, d_model=8, seq_len=5, **BLOCK),
}


def graph_of(options, notation="SM+QuadGLU"):
    return resolve_model(notation, ModelOptions(**options)).graph


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_counts_and_logits_of_a_block_in_a_small_ring(case):
    pytest.importorskip(PACKAGE)
    comparison = compare(graph_of(CASES[case]), Library(13, is_bootstrapped=False))
    assert comparison.measured == comparison.predicted
    assert comparison.predicted["bootstrap"] > 0
    assert comparison.logits_max_abs_error < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_block_with_real_bootstraps():
    pytest.importorskip(PACKAGE)
    graph = graph_of(dict(base="smollm2-135m", heads=3, d_model=12, seq_len=4, **BLOCK))
    comparison = compare(graph, Library(17, is_bootstrapped=True))
    assert comparison.measured == comparison.predicted
    assert comparison.logits_max_abs_error < STATED_ERROR
    assert abs(comparison.seconds_error) <= SECONDS_BAR


@pytest.mark.slow
def test_a_step_that_no_library_runs_is_refused():
    pytest.importorskip(PACKAGE)
    with pytest.raises(UserError, match=r"a library runs attention by eighth powers alone"):
        compare(graph_of({**CASES["grouped heads, rotary"], "softmax": "exact"}), Library(13, is_bootstrapped=False))


def test_a_missing_library_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(
        UserError, match=r"protocol ckks runs under desilofhe, which is not installed; run: python -m pip"
    ):
        Library(13, is_bootstrapped=False)
