import math
from dataclasses import replace

from nas.recipe.papers import recipe_for
from nas.results.parent import ParentResult
from nas.study import run_study
from nas.study.run_study import FEW_TOKENS, report_line, start_line


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


def test_a_search_does_not_fail_for_its_report(monkeypatch, tmp_path):
    def fail(folder):
        raise KeyError("a bug")

    monkeypatch.setattr(run_study, "write_report", fail)
    assert report_line(tmp_path) == f"note: no report was written ('a bug'); try python -m nas.report {tmp_path}"
