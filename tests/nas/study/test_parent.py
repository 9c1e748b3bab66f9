import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from costmodel.errors import StoppedError, UserError
from nas import train
from nas.conversion.parent import BUILTIN, kept_parent, load_parent
from nas.conversion.pretrained import write_pretrained
from nas.corpus.corpus import Corpus, prepare
from nas.export import training_export
from nas.model.decoder import Decoder
from nas.model.weights import load_stored
from nas.recipe.candidate import recipe_at
from nas.recipe.recipe import SCALES
from nas.report.html import page
from nas.run.config import StudyConfig, study_recipe
from nas.run.folder import PARENT_FOLDER, ParentResult, read_meta, write_meta
from nas.study.meta import FEW_TOKENS, new_meta, opening_lines, parent_result, start_line
from nas.study.parent import find_parent
from nas.study.resolve import ONE_KIND, training_corpus, usual_parent
from nas.study.run_study import _closing, report_line
from nas.study.time_budget import TimeBudget
from nas.study.worker import run_trial
from nas.training import checkpoint
from nas.training.batches import agreement
from search_spaces.bases import BASES
from tests.nas.study.conftest import ONE_TRIAL, untrained_parent


@pytest.fixture
def folder(source_files: str, tmp_path: Path) -> Path:
    write_pretrained(untrained_parent(prepare(source_files, vocab_size=512)).model, tmp_path / "made")
    return tmp_path / "made"


@pytest.fixture
def corpus(folder: Path, source_files: str) -> Corpus:
    return prepare(source_files, vocab_size=512, tokenizer=load_parent(str(folder)).model.tokenizer)


@pytest.mark.parametrize(
    ("config", "base", "name"),
    [
        ({}, "gpt2-small", BUILTIN),
        ({"parent": "none"}, "gpt2-small", None),
        ({"scale": "gpu"}, "gpt2-small", None),
        ({"scale": "paper"}, "gpt2-small", None),
        ({}, "gpt2-18l", None),
        ({"seq_len": 256}, "gpt2-small", None),
    ],
)
def test_the_builtin_parent_is_the_default_where_it_fits(config, base, name):
    assert getattr(usual_parent(StudyConfig(budget_latency="5min", **config), BASES[base]), "name", None) == name


@pytest.mark.parametrize("name", ["2xlSooo", "1xooLFo-1xLSlRo", "SM+ScFuFFN"])
def test_a_trial_starts_from_the_parent_and_ends_as_its_candidate(make_trials, corpus, folder, tmp_path, name):
    parent = load_parent(str(folder))
    write_pretrained(parent.model, tmp_path / PARENT_FOLDER)
    recipe = study_recipe(ONE_TRIAL, parent.distillation)
    recipe = replace(recipe, scale=replace(recipe.scale, learning_rate=1e-2))
    trials = make_trials(tmp_path, corpus, recipe=recipe, initial=[name])
    trial = trials.next_trial()
    *_, last = run_trial(trial)
    assert (last.status, last.reason) == ("completed", None)
    load_stored(Decoder(trial.candidate.trained), checkpoint.load_latest(trial.folder).weights)
    assert list(Path(corpus.folder).glob("likely-*.bin"))
    assert last.parent_divergence > 1e-4
    assert 0 <= last.parent_agreement < 1
    assert agreement(parent.decoder(), parent.decoder(), corpus, trial.candidate.recipe.scale) == (0.0, 1.0)


def test_a_trial_whose_parent_was_edited_fails_with_a_reason(make_trials, corpus, folder, tmp_path):
    write_pretrained((parent := load_parent(str(folder))).model, tmp_path / PARENT_FOLDER)
    (tmp_path / PARENT_FOLDER / "trained.yaml").write_text("block: gpt2\n")
    *_, last = run_trial(make_trials(tmp_path, corpus, distillation=parent.distillation).next_trial())
    assert last.status == "failed"
    assert "must be as it was written" in last.reason


def test_the_parent_is_validated_and_priced_as_it_is(feasible, corpus, folder, make_meta):
    result = parent_result(load_parent(str(folder)), corpus, SCALES["smoke"], feasible)
    assert (result.notation, result.latency_s > 0) == ("SM+LN+G", True)
    assert result.perplexity == math.exp(result.val_loss) == pytest.approx(512, rel=0.1)  # it has learned nothing
    weak = make_meta(parent=result, reference=(300.0, corpus.unigram_loss), vocab_size=corpus.vocab_size).weak_parent
    assert weak.startswith("parent ")


def test_a_training_is_a_parent_by_its_folder_or_as_the_latest(source_files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no training under runs/ yet; start one with python -m nas.train"):
        find_parent("latest")
    folder = tmp_path / "runs" / "one"
    smoke = ("--base", "tiny", "--scale", "smoke", "--seq-len", "16", "--tokens", "1024", "--data", source_files)
    assert train.main(["SM+LN+G", *smoke, "--output-dir", str(folder)]) == 0
    parent = find_parent("latest")
    assert (parent.name, parent.distillation.placement) == ("runs/one", "2xLSLGo")
    assert parent.digest == find_parent(str(folder)).digest
    assert parent.model.windows is not None
    made = training_export(folder).weights
    assert all(made[name].equal(value) for name, value in parent.model.weights.items())


def test_a_model_of_others_is_recovered_on_text_of_its_kinds(folder, monkeypatch, caplog):
    caplog.set_level("INFO", "nas")
    monkeypatch.setattr("nas.study.resolve.open_source", lambda data: SimpleNamespace(read=()))
    monkeypatch.setattr("nas.study.resolve.prepare", lambda data, **settings: None)
    theirs = load_parent(str(folder)).model._replace(windows=None)
    ours = load_parent(BUILTIN).model
    for data, model in (("stdlib", theirs), ("stdlib", ours), ("other", theirs), ("stdlib", None)):
        training_corpus(data, model, vocab_size=512, seq_len=16, tokens=16)
    assert caplog.messages == [ONE_KIND]


@pytest.mark.parametrize(("rule", "begin"), [("tokenizer", None), ("<|endoftext|>", "<|endoftext|>")])
def test_a_run_says_and_keeps_what_begins_its_sequences(rule, begin, feasible, folder, source_files, tmp_path):
    parent = find_parent(str(folder), rule)
    assert (parent.digest == load_parent(str(folder)).digest) == (begin is None)
    corpus = prepare(source_files, vocab_size=512, tokenizer=parent.model.tokenizer)
    meta = new_meta(ONE_TRIAL, feasible, corpus, corpus, parent)
    assert meta.second.fingerprint == corpus.fingerprint
    assert meta.second.parent_loss == pytest.approx(meta.parent.val_loss)
    write_meta(tmp_path, meta)
    write_pretrained(parent.model, tmp_path / PARENT_FOLDER)
    assert (meta.begin_of_text, read_meta(tmp_path)) == (begin, meta)
    kept = kept_parent(tmp_path / PARENT_FOLDER, "made", parent.digest)
    assert kept.model.tokenizer.json == parent.model.tokenizer.json
    (said,) = (line for line in opening_lines(meta, corpus, parent, rule) if "begins with" in line)
    assert (repr(begin) if begin else "no token of its own") in said


def test_a_study_says_what_its_candidates_start_from_and_warns_of_few_tokens(make_meta):
    recipe = recipe_at("proxy", "stdlib", entropy_regularised=False)
    enough = replace(recipe, scale=replace(recipe.scale, tokens=FEW_TOKENS))
    parent = ParentResult(name="builtin", notation="SM+LN+G", val_loss=math.log(7.0), latency_s=400.0)
    for meta, said in (
        ({"recipe": recipe}, "from scratch on 524,288 tokens candidates are likely to be worse than a trigram model"),
        ({"recipe": enough}, "candidates are trained from scratch on 8,388,608 tokens"),
        ({"parent": parent}, "candidates start from parent builtin, SM+LN+G, perplexity 7.00 on the tokens that val"),
    ):
        assert said in start_line(make_meta(**meta))


def test_a_parent_no_better_than_one_without_context_is_told_before_and_after(make_meta, make_run, corpus, tmp_path):
    """By the lower of the unigram's loss, here 5 nats, and that of a uniform guess among 512 tokens or 8."""
    parent = ParentResult(name="made", notation="SM", val_loss=5.0, latency_s=400.0)
    meta = make_meta(parent=parent)
    told = (
        "parent made has perplexity 148.41 on the validation tokens, no better than a model without context (148.41), "
        "so candidates are likely to diverge; train it first, or check its weights, its tokenizer and --data"
    )
    assert opening_lines(meta, corpus, None)[-1] == f"warning: {told}"
    better = make_meta(parent=replace(parent, val_loss=4.9))
    assert better.weak_parent == make_meta().weak_parent == ""
    assert "without context (8.00)" in replace(better, vocab_size=8).weak_parent
    trials: Any = SimpleNamespace(running={}, finished=True, records=())
    for run_meta, hint in ((meta, f"; {told}."), (better, ".")):
        with pytest.raises(StoppedError) as stopped:
            _closing(trials, replace(make_run(), meta=run_meta), TimeBudget(None, 0.0))
        why = f"see the reasons in {tmp_path / 'trials.csv'}{hint}"
        assert str(stopped.value) == f"no trial was trained to completion: {why}"


def test_a_search_does_not_fail_for_its_report(monkeypatch, make_run, tmp_path):
    def fail(run):
        raise KeyError("a bug")

    monkeypatch.setattr(page, "write_report", fail)
    assert report_line(make_run()) == f"note: no report was written ('a bug'); try python -m nas.report {tmp_path}"
