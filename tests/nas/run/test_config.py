"""The recipe that a study gives its candidates."""

from dataclasses import replace

import pytest

from nas.recipe.candidate import candidate_at, candidate_id
from nas.recipe.recipe import Foldable
from nas.run.config import StudyConfig, study_candidate, study_recipe
from search_spaces.bases import BASES
from search_spaces.notation import parse

CONFIG = StudyConfig(budget_latency="25s", space="tiny", scale="smoke", seq_len=16)


@pytest.mark.parametrize(
    ("name", "foldable"),
    [("SM+ScFuFFN", Foldable()), ("EReg(SM+ScFFN)", Foldable()), ("SM+LN+ScFuFFN", None), ("SM+R", None)],
)
def test_ffns_whose_price_is_that_of_nothing_are_kept_foldable(name: str, foldable: Foldable | None) -> None:
    member = parse(name, BASES["tiny"])
    assert study_candidate(study_recipe(CONFIG, None), member).recipe.foldable == foldable
    written = study_candidate(study_recipe(replace(CONFIG, accounting="written"), None), member)
    assert written.recipe.foldable is None
    plain = candidate_at(member, "smoke", seq_len=16, tokens=None, data="stdlib")
    assert candidate_id(written) == candidate_id(plain)
    assert (candidate_id(study_candidate(study_recipe(CONFIG, None), member)) == candidate_id(plain)) == (
        foldable is None
    )
