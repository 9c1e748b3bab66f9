"""Ids of candidates name folders and ledgers, so they stay whatever becomes of the code."""

from dataclasses import replace
from typing import Any

import pytest

from nas.recipe.candidate import candidate_at, candidate_id, trial_id
from nas.recipe.distillation import DistillationSchedule
from search_spaces.bases import base_architecture
from search_spaces.notation import parse


@pytest.mark.parametrize(
    ("name", "scale", "data", "expected"),
    [
        ("SM+LN+G", "proxy", "stdlib", "d245ef09f234"),
        ("EReg(SM(t)+ScFuFFN_i6)", "proxy", "stdlib", "aa10b3f57313"),
        ("EReg(SM(t)+ScFuFFN)", "paper", "languini", "9a68ce2f740d"),
    ],
)
def test_golden_ids(name: str, scale: str, data: str, expected: str) -> None:
    """A new field must not change them: it is left out of the canonical form where it has its default."""
    member = parse(name, base_architecture("gpt2-small"))
    candidate = candidate_at(member, scale, seq_len=None, tokens=None, data=data)  # type: ignore[arg-type]
    assert candidate_id(candidate) == expected
    assert trial_id(candidate, seed=3, attempt=1) == f"{expected}-s3-a1"


@pytest.mark.parametrize(("seed", "attempt"), [(-1, 0), (0, -1)])
def test_negative_numbers_name_no_trial(seed: int, attempt: int) -> None:
    member = parse("SM", base_architecture("tiny"))
    with pytest.raises(ValueError, match="must not be negative"):
        trial_id(candidate_at(member, "smoke", seq_len=None, tokens=None, data="stdlib"), seed=seed, attempt=attempt)


@pytest.mark.parametrize(
    "stated", [{"parent": "q"}, {"most_likely": 64}, {"trainable": "changed"}, {"blockwise_tokens": 1024}]
)
def test_what_a_schedule_states_beyond_its_defaults_makes_another_candidate(stated: dict[str, Any]) -> None:
    member = parse("SM+R", base_architecture("gpt2-small"))
    route = DistillationSchedule(parent="p", placement="12xLSLGo")
    ids = [
        candidate_id(candidate_at(member, "proxy", data="stdlib", route=made))
        for made in (route, replace(route, **stated))
    ]
    assert ids[0] == "0fbaa18397f9"
    assert ids[1] != ids[0]
