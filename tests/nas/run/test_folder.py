import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from costmodel.errors import UserError
from costmodel.network import NETWORKS
from costmodel.protocols.derived import TESTBEDS
from nas.recipe.candidate import candidate_at, candidate_id
from nas.recipe.distillation import DistillationSchedule
from nas.recipe.overrides import DistillationChanges, FoldableChanges, RecipeChanges, ScaleChanges
from nas.recipe.recipe import Foldable
from nas.run.config import StudyConfig, study_candidate, study_recipe
from nas.run.folder import (
    new_folder,
    read_config,
    read_meta,
    run_pricer,
    run_pricers,
    run_space,
    write_config,
    write_meta,
)
from nas.search import parse as parse_search
from nas.study.meta import checked_meta
from nas.study.priced_study import price_study
from search_spaces.bases import BASES
from search_spaces.notation import parse

NETWORK = "name: mine\nbandwidth_bits_per_s: 1.0e+8\nrtt_s: 0.02\nsource: a cable\n"


@pytest.fixture
def config(tmp_path: Path) -> StudyConfig:
    """A configuration that names files which are not there for long."""
    (tmp_path / "network.yml").write_text(NETWORK)
    (tmp_path / "testbed.yaml").write_bytes((TESTBEDS / "semi2k.yaml").read_bytes())
    (tmp_path / "space.yaml").write_text("name: mine\nbase: tiny\nmembers: [SM+R, SM+G]\n")
    files: dict[str, Any] = {path.stem: str(path) for path in tmp_path.iterdir()}
    return StudyConfig(budget_latency="5min", protocol="semi2k", **files)


def test_prices_and_space_stay_when_the_files_go(config, tmp_path):
    before, folder = run_pricer(None, config, config.protocol), tmp_path / "run"
    folder.mkdir()
    write_config(folder, config)
    for path in (config.space, config.network, config.testbed):
        Path(path or "").unlink()
    after = run_pricer(folder, config, config.protocol)
    assert (read_config(folder), after, after.cost_model_id) == (config, before, before.cost_model_id)
    assert run_space(folder, config).name == "mine"


def test_a_new_run_has_its_own_folder_and_the_files_that_were_asked_for(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len({new_folder(None) for _ in range(3)}) == 3
    (folder := tmp_path / "run").mkdir()
    (folder / "space.yaml").write_text("name: of-before\nbase: tiny\nmembers: [SM+R]\n")
    write_config(folder, config)
    assert run_space(folder, config).name == "mine"


def test_files_of_one_protocol_among_several_stay_too(config, tmp_path):
    files = [Path(config.network or ""), Path(config.testbed or "")]
    config = replace(config, protocol="sigma,semi2k", network=f"semi2k={files[0]}", testbed=f"semi2k={files[1]}")
    before, folder = run_pricers(None, config), tmp_path / "run"
    folder.mkdir()
    write_config(folder, config)
    for path in files:
        path.unlink()
    assert run_pricers(folder, config) == before
    assert [pricer.network for pricer in before] == ["lan", "mine"]
    kept = {"run.yaml", "space.yaml", "network-semi2k.yaml", "testbed-semi2k.yaml"}
    assert {path.name for path in folder.iterdir()} == kept


def test_a_run_is_read_where_its_searcher_is_not_and_presets_are_not_copied(tmp_path):
    config = StudyConfig(budget_latency="5min", searcher="not_here:Mine")
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config
    with pytest.raises(UserError, match="'not_here:Mine' cannot be loaded"):
        price_study(config)
    config = StudyConfig(budget_latency="5min", protocol="semi2k", network="wan", space="tiny")
    write_config(tmp_path, config)
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    assert run_pricer(tmp_path, config, config.protocol).network == NETWORKS["wan"].name


def test_ngrams_are_kept_and_may_be_missing(tmp_path, make_meta, ngrams):
    write_meta(tmp_path, make_meta(ngrams=ngrams))
    assert read_meta(tmp_path).ngrams == ngrams
    data = json.loads((tmp_path / "meta.json").read_text())
    del data["ngrams"]
    (tmp_path / "meta.json").write_text(json.dumps(data))
    assert read_meta(tmp_path) == make_meta()


def test_results_of_other_prices_or_data_are_never_mixed(tmp_path, make_run, make_meta, feasible, corpus):
    config, run = StudyConfig(budget_latency="5min"), make_run()
    with pytest.raises(UserError, match="`cost_model_id` of .* must be the present one, 0, but is 1-m; .* never mixed"):
        checked_meta(replace(run, meta=make_meta()), config, feasible, corpus)
    with pytest.raises(UserError, match="`corpus` of .*, but is c; .* start a new run"):
        checked_meta(replace(run, meta=make_meta(cost_model_id="0")), config, feasible, corpus)
    known = make_meta(cost_model_id="0", corpus=corpus.fingerprint, tokenizer=corpus.tokenizer)
    expected = replace(known, reference=(240.0, known.reference[1]), num_feasible=feasible.num_feasible)
    config = replace(config, budget_latency="4min")
    assert checked_meta(replace(run, meta=known), config, feasible, corpus) == expected


CONFIG = StudyConfig(budget_latency="25s", space="tiny", scale="smoke", seq_len=16)


@pytest.mark.parametrize(
    ("name", "foldable"),
    [("SM+ScFuFFN", Foldable()), ("EReg(SM+ScFFN)", Foldable()), ("SM+LN+ScFuFFN", None), ("SM+R", None)],
)
def test_ffns_whose_price_is_that_of_nothing_are_kept_foldable(name, foldable):
    member = parse(name, BASES["tiny"])
    assert study_candidate(study_recipe(CONFIG, None), member).recipe.foldable == foldable
    written = study_candidate(study_recipe(replace(CONFIG, cost_of="unfolded"), None), member)
    assert written.recipe.foldable is None
    plain = candidate_id(candidate_at(member, "smoke", seq_len=16, tokens=None, data="stdlib"))
    assert candidate_id(written) == plain
    assert (candidate_id(study_candidate(study_recipe(CONFIG, None), member)) == plain) == (foldable is None)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"public_layers": "0-2"}, 3),
        ({"public_layers": "embed,0-1", "client_layers": 1}, 2),
        ({"client_layers": 4}, 4),
        ({}, None),
    ],
)
def test_layers_that_are_no_secret_stay_the_parents(given, kept):
    config, plain = replace(CONFIG, parent="builtin", **given), replace(CONFIG, parent="builtin")
    distillation = DistillationSchedule(parent="p", placement="12xLSLGo", spread_over_depth=True)
    recipe = study_recipe(config, distillation)
    assert (recipe.distillation.kept_layers, recipe.distillation.spread_over_depth) == (kept, kept is None)
    member = parse("SM+LN+R", BASES["gpt2-small"])
    ids = [candidate_id(study_candidate(study_recipe(variant, distillation), member)) for variant in (config, plain)]
    assert (ids[0] == ids[1]) == (kept is None)


SPREAD = RecipeChanges(distillation=DistillationChanges(spread_over_depth=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"public_layers": "1-2"}, "--public-layers of a search must be the first ones, .* but got 1-2; leave"),
        ({"public_layers": "head"}, "--public-layers of a search must be the first ones, .* but got head; leave"),
        ({"parent": None, "client_layers": 2}, "--public-layers and --client-layers are of --parent, .*; name it"),
        ({"client_layers": 2, "recipe": SPREAD}, "distillation.spread-over-depth moves layers that .* keep; drop it"),
    ],
)
def test_layers_that_are_no_secret_are_the_first_and_a_parents(given, message):
    with pytest.raises(UserError, match=message):
        replace(CONFIG, **{"parent": "builtin", **given})


def test_a_search_takes_changes_of_the_recipe():
    given = parse_search(["--budget-latency=25s", "--recipe.scale.batch=16", "--recipe.weight-decay=0.5"])
    recipe = study_recipe(StudyConfig(**given), None)
    assert (recipe.scale.batch, recipe.weight_decay, recipe.foldable) == (16, 0.5, Foldable())
    kept = study_recipe(replace(CONFIG, recipe=RecipeChanges(foldable=FoldableChanges(floor=0.3))), None)
    assert kept.foldable == Foldable(floor=0.3)
    with pytest.raises(UserError, match=r"--recipe\.scale\.head-dim is that of --scale in a search"):
        replace(CONFIG, recipe=RecipeChanges(scale=ScaleChanges(head_dim=8)))
