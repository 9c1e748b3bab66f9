import math
from dataclasses import replace

import pytest
import torch

from nas.recipe.papers import recipe_for
from nas.results.parent import ParentResult
from nas.study import run_study
from nas.study.config import StudyConfig
from nas.study.run_study import FEW_TOKENS, report_line, start_line, study_resources


def resources(monkeypatch, *, cores, gpus=0, **settings):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    found = study_resources(StudyConfig(budget_latency="5min", **settings))
    return found.max_concurrent, found.threads_per_trial, found.num_gpus


@pytest.mark.parametrize(
    ("cores", "asked", "expected"),
    [(2, None, (2, 1, 0)), (2, 1, (1, 2, 0)), (2, 8, (2, 1, 0)), (16, 3, (3, 5, 0)), (1, None, (1, 1, 0))],
)
def test_cores_are_filled_and_never_oversubscribed(monkeypatch, cores, asked, expected):
    assert resources(monkeypatch, cores=cores, max_concurrent=asked) == expected


@pytest.mark.parametrize(
    ("gpus", "share", "expected"),
    [(1, 1.0, (1, 16, 1)), (1, 0.5, (2, 8, 1)), (2, 0.6, (2, 8, 2)), (4, 2.0, (2, 8, 4)), (1, 0.3, (3, 5, 1))],
)
def test_gpus_are_shared_whole(monkeypatch, gpus, share, expected):
    assert resources(monkeypatch, cores=16, gpus=gpus, gpus_per_trial=share) == expected


def test_too_few_gpus_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"--gpus-per-trial 2.0 needs a CUDA device for each, but there are 1"):
        resources(monkeypatch, cores=16, gpus=1, gpus_per_trial=2.0)


def test_a_share_above_one_is_whole():
    with pytest.raises(ValueError, match="--gpus-per-trial must be whole or below 1"):
        StudyConfig(budget_latency="5min", gpus_per_trial=1.5)


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
