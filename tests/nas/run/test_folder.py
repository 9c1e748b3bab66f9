import json
from dataclasses import replace
from pathlib import Path

import pytest

from costmodel.errors import UserError
from costmodel.network import NETWORKS
from costmodel.protocols.derived import TESTBEDS
from nas.run.config import StudyConfig
from nas.run.folder import read_config, read_meta, run_pricer, run_pricers, run_space, write_config, write_meta
from nas.run.ledger import SCHEMA_VERSION
from nas.run.run import Run
from nas.study.meta import checked_meta
from nas.study.priced_study import price_study

NETWORK = "name: mine\nbandwidth_bits_per_s: 1.0e+8\nrtt_s: 0.02\nsource: a cable\n"


@pytest.fixture
def config(tmp_path: Path) -> StudyConfig:
    """A configuration that names files which are not there for long."""
    (tmp_path / "network.yml").write_text(NETWORK)
    (tmp_path / "testbed.yaml").write_bytes((TESTBEDS / "semi2k.yaml").read_bytes())
    (tmp_path / "space.yaml").write_text("name: mine\nbase: tiny\nmembers: [SM+R, SM+G]\n")
    return StudyConfig(
        budget_latency="5min",
        protocol="semi2k",
        space=str(tmp_path / "space.yaml"),
        network=str(tmp_path / "network.yml"),
        testbed=str(tmp_path / "testbed.yaml"),
    )


def test_prices_and_space_stay_when_the_files_go(config, tmp_path):
    before, folder = run_pricer(None, config, config.protocol), tmp_path / "run"
    folder.mkdir()
    write_config(folder, config)
    for path in (config.space, config.network, config.testbed):
        Path(path or "").unlink()
    assert read_config(folder) == config
    assert run_pricer(folder, config, config.protocol) == before
    assert run_pricer(folder, config, config.protocol).cost_model_id == before.cost_model_id
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
    assert {path.name for path in folder.iterdir()} == {
        *("run.yaml", "space.yaml", "network-semi2k.yaml", "testbed-semi2k.yaml")
    }


def test_a_run_is_read_where_its_searcher_is_not(tmp_path):
    config = StudyConfig(budget_latency="5min", searcher="not_here:Mine")
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config
    with pytest.raises(UserError, match="'not_here:Mine' cannot be loaded"):
        price_study(config)


def test_presets_are_not_copied(tmp_path):
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


def test_a_run_of_another_schema_is_refused_in_a_line(tmp_path, make_run):
    run = make_run()
    write_config(tmp_path, run.config)
    write_meta(tmp_path, run.meta)
    path = tmp_path / "meta.json"
    path.write_text(path.read_text().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 3'))
    with pytest.raises(UserError, match=rf"^{path}: `schema_version` must be {SCHEMA_VERSION}, but got 3; [^\n]*$"):
        Run.read(tmp_path)


def test_results_of_other_prices_or_data_are_never_mixed(tmp_path, make_run, make_meta, feasible, corpus):
    config, run = StudyConfig(budget_latency="5min"), make_run()
    with pytest.raises(UserError, match="`cost_model_id` of .* must be the present one, 0, but is 1-m; .* never mixed"):
        checked_meta(replace(run, meta=make_meta()), config, feasible, corpus)
    with pytest.raises(UserError, match="`corpus` of .*, but is c; .* start a new run"):
        checked_meta(replace(run, meta=make_meta(cost_model_id="0")), config, feasible, corpus)
