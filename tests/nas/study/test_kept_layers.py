"""Layers of a parent that a search keeps, since they are no secret: which can be, and what they cost."""

from dataclasses import replace
from typing import Any

import pytest

from costmodel.errors import UserError
from costmodel.protocols import load_pricer
from nas.conversion.parent import Parent
from nas.conversion.pretrained import Pretrained
from nas.recipe.recipe import SCALES, trained_architecture
from nas.run.config import StudyConfig
from nas.study.priced_study import price_study
from search_spaces.bases import BASES
from search_spaces.budget.priced_space import price_of
from search_spaces.notation import parse
from search_spaces.pricing import price_architecture
from search_spaces.space import members
from tests.nas.study.conftest import ONE_TRIAL


def of_parent(monkeypatch: pytest.MonkeyPatch, notation: str, **given: Any) -> StudyConfig:
    """A study from a parent of these layers."""
    theirs = trained_architecture(parse(notation, BASES["tiny"]).architecture, SCALES["smoke"])
    model = Pretrained(architecture=theirs, weights={}, tokenizer=None)
    monkeypatch.setattr("nas.study.parent.load_parent", lambda name: Parent(name, model, "digest"))
    return replace(ONE_TRIAL, parent="made", protocol="semi2k", **given)


@pytest.mark.parametrize(
    ("notation", "kept", "said"),
    [
        ("2xLSLGo", 0, "no layer"),
        ("2xlSlGo", 1, "1xlSlGo"),  # its embedding takes up the linear FFNs behind it
        ("1xLSooo-1xLSLGo", 1, "1xLSooo"),  # an FFN behind it would be of layer 0
        ("1xooLGo-1xLSLGo", 1, "1xooLGo"),
    ],
)
def test_layers_that_folding_may_change_are_refused(notation: str, kept: int, said: str, monkeypatch) -> None:
    for given in ({"client_layers": kept}, {"public_layers": f"embed,0-{kept - 1}" if kept else "embed"}):
        with pytest.raises(UserError, match=f"must keep layers of --parent that .*, but got {said}; keep others, or"):
            price_study(of_parent(monkeypatch, notation, **given))


def test_every_member_is_priced_with_them_at_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    config = of_parent(monkeypatch, "1xLSMFo-1xLSLGo", client_layers=1)
    priced, pricer = price_study(config).feasible.priced, load_pricer("semi2k")
    for member in members(priced.space):
        whole = price_architecture(member.architecture, pricer, config.workload, "deployed").price
        assert price_of(priced, member).sent_bytes == pytest.approx(whole.sent_bytes)


def test_a_space_that_lists_its_members_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="offers choices for each layer, but ladder lists its members; leave them out"):
        price_study(of_parent(monkeypatch, "2xLSLGo", space="ladder", client_layers=1))
