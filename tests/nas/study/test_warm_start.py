from dataclasses import replace

import pytest

from costmodel.errors import UserError
from nas.recipe.recipe import Scale
from nas.run import ledger
from nas.run.config import StudyConfig, study_recipe
from nas.run.folder import write_config, write_meta
from nas.run.front import front
from nas.study.open_run import proposals_of
from nas.study.schedule import LAG
from nas.study.warm_start import begin_with, read_warm_start

OTHER = StudyConfig(budget_latency="25s", space="tiny", scale="smoke", seq_len=16, parent="none")
PLACES = ("2xoSoFs", "1xoSoRs-1xoSoFs", "1xLSoFo-1xoSoFs", "2xLSLGo", "2xoSoFo")


@pytest.fixture
def meta(feasible, make_meta):
    return make_meta(base=feasible.space.base, recipe=study_recipe(OTHER, None))


@pytest.fixture
def other(meta, make_record, tmp_path):
    """The folder of a run with four candidates, one of which failed, a replicate and a baseline."""
    folder = tmp_path / "other"
    folder.mkdir()
    write_meta(folder, meta)
    write_config(folder, OTHER)
    common = {"protocol": "elsewhere", "latency_s": 1.0, "sent_bytes": 1.0, "versions": {}}
    records = [
        make_record(0, role="baseline", placement=PLACES[3], **common),
        make_record(1, placement=PLACES[0], generation=0, event="proposed", status="proposed", **common),
        make_record(1, placement=PLACES[0], event="rung", rung=0, status="running", val_loss=2.5, **common),
        make_record(2, placement=PLACES[1], generation=1, status="failed", reason="no", val_loss=None, **common),
        make_record(3, placement=PLACES[2], generation=1, status="diverged", val_loss=None, **common),
        make_record(1, placement=PLACES[0], generation=0, **common),
        make_record(1, placement=PLACES[0], generation=4, role="replicate", seed=1, trial_id="t1-s1-a0", **common),
    ]
    ledger.append(folder / ledger.FILE_NAME, *records)
    weights = folder / "trials" / "t1-s0-a0" / "checkpoints" / "step-000000001-end"
    weights.mkdir(parents=True)
    (weights / "weights.safetensors").write_bytes(b"weights")
    return folder


def config_of(other, **changes):
    return replace(OTHER, warm_start=str(other), **changes)


def test_what_another_run_trained_comes_first_at_prices_of_this_one(other, meta, feasible):
    warm = read_warm_start(config_of(other), feasible, meta)
    assert warm.num_trials == 3
    assert [(record.event, record.index, record.seed, record.status) for record in warm.records] == [
        ("proposed", 0, 0, "proposed"),
        ("rung", 0, 0, "running"),
        ("finished", 0, 0, "completed"),
        ("finished", 0, 1, "completed"),
        ("proposed", 1, 0, "proposed"),
        ("finished", 1, 0, "diverged"),
    ]
    assert {record.generation for record in warm.records} == {-LAG}
    assert {record.protocol for record in warm.records} == {"toy"}
    assert warm.records[1].val_loss == 2.5
    first = proposals_of(warm.records, feasible.space.base)[0]
    assert feasible.fits(first.member)
    assert warm.records[2].latency_s > 1.0


def begin(config, feasible, meta, folder):
    warm = read_warm_start(config, feasible, meta)
    assert warm is not None
    begin_with(warm, folder, config)


def test_only_what_is_within_the_budget_is_on_the_front_and_has_weights(other, meta, feasible, tmp_path):
    (tmp_path / "a").mkdir()
    config = config_of(other)
    begin(config, feasible, meta, tmp_path / "a")
    records = ledger.read(tmp_path / "a" / ledger.FILE_NAME)
    assert [member.num_seeds for member in front(records, config.budget)] == [2]
    assert (
        tmp_path / "a/trials/t1-s0-a0/checkpoints/step-000000001-end/weights.safetensors"
    ).read_bytes() == b"weights"
    (tmp_path / "b").mkdir()
    tight = config_of(other, budget_latency="2s")
    begin(tight, feasible, meta, tmp_path / "b")
    assert front(ledger.read(tmp_path / "b" / ledger.FILE_NAME), tight.budget) == ()
    assert not (tmp_path / "b" / "trials").exists()


def changed(meta, name):
    scale: Scale = meta.recipe.scale
    return {
        "corpus": replace(meta, corpus="d"),
        "`d_model`": replace(meta, base=replace(meta.base, d_model=2 * meta.base.d_model)),
        "`num_layers`": replace(meta, base=replace(meta.base, layers=meta.base.layers * 2)),
        "`scale` of the recipe": replace(meta, recipe=replace(meta.recipe, scale=replace(scale, tokens=512))),
    }[name]


@pytest.mark.parametrize("name", ["corpus", "`d_model`", "`num_layers`", "`scale` of the recipe"])
def test_a_run_of_something_else_is_refused_in_a_line(other, meta, feasible, name):
    with pytest.raises(UserError, match=f"--warm-start .* must have the {name} of this run, .*, but has ") as info:
        read_warm_start(config_of(other), feasible, changed(meta, name))
    assert "\n" not in str(info.value)


def test_another_seed_and_another_parent_are_refused(other, meta, feasible, make_meta):
    with pytest.raises(UserError, match="must have the seed of this run, 1, but has 0"):
        read_warm_start(config_of(other, seed=1), feasible, meta)
    from nas.recipe.distillation import DistillationSchedule

    started = replace(meta, recipe=study_recipe(OTHER, DistillationSchedule(parent="digest", placement="2xLSLGo")))
    with pytest.raises(UserError, match="must have the parent of this run, digest, but has None"):
        read_warm_start(config_of(other), feasible, started)


def test_a_later_ledger_and_an_empty_one_are_refused(other, meta, feasible):
    path = other / ledger.FILE_NAME
    path.write_text(path.read_text().replace(f'"schema_version":{ledger.SCHEMA_VERSION}', '"schema_version":99'))
    with pytest.raises(UserError, match=f"`schema_version` must be {ledger.SCHEMA_VERSION}, but got 99"):
        read_warm_start(config_of(other), feasible, meta)
    path.write_text("")
    with pytest.raises(UserError, match="must have trained candidates of this space, but has none"):
        read_warm_start(config_of(other), feasible, meta)
