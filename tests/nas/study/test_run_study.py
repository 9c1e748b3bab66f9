import math
from dataclasses import replace

from nas.recipe.papers import recipe_for
from nas.report.html import page
from nas.run.folder import ParentResult
from nas.study.meta import FEW_TOKENS, start_line
from nas.study.run_study import report_line
from tests.imports import loaded_by


def test_a_study_from_scratch_on_few_tokens_is_warned(make_meta):
    recipe = recipe_for("proxy", "stdlib", entropy_regularised=False)
    assert "from scratch on 524,288 tokens candidates are likely to know less than a trigram" in start_line(
        make_meta(recipe=recipe)
    )
    enough = replace(recipe, scale=replace(recipe.scale, tokens=FEW_TOKENS))
    assert start_line(make_meta(recipe=enough)) == "candidates are trained from scratch on 8,388,608 tokens"


def test_a_study_says_what_its_candidates_start_from(make_meta):
    parent = ParentResult(name="builtin", notation="SM+LN+G", val_loss=math.log(7.0), latency_s=400.0)
    expected = "candidates start from parent builtin, SM+LN+G, perplexity 7.00 on the tokens that validate them"
    assert start_line(make_meta(parent=parent)) == expected


def test_a_search_does_not_fail_for_its_report(monkeypatch, make_run, tmp_path):
    def fail(run):
        raise KeyError("a bug")

    monkeypatch.setattr(page, "write_report", fail)
    assert report_line(make_run()) == f"note: no report was written ('a bug'); try python -m nas.report {tmp_path}"


def test_what_trains_starts_trials_and_draws_is_imported_when_it_does():
    """Torch, Ray and matplotlib are three seconds of processor time, of which no part of a study needs all."""
    heavy = {"torch", "ray", "matplotlib", "scipy", "pandas", "jinja2"}
    assert not loaded_by("import nas.study.run_study") & heavy
