"""The experiments on SmolLM2, with a tiny Llama in the place of the model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from costmodel.errors import UserError
from experiments.__main__ import settings_of
from experiments.smollm2 import healing
from experiments.smollm2.corpora import TEXT
from experiments.smollm2.results import read_results
from experiments.smollm2.search import SearchSettings
from nas.conversion.pretrained import Pretrained, write_pretrained
from nas.corpus.corpus import prepare, tokenizer_folder
from nas.corpus.tokenizer import kept_tokenizer
from nas.model.decoder import build
from nas.model.weights import deployed_weights
from search_spaces.bases import Dimensions, base_architecture
from tests.conftest import write_email

ARCHITECTURE = base_architecture(
    "smollm2-135m", Dimensions(layers=3, heads=4, kv_heads=2, d_model=16, d_ff=24, vocab=512, context=128)
)


@pytest.fixture
def setting(tmp_path, monkeypatch):
    """Settings of a few steps, in a folder with text and a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "out").mkdir()
    write_email(tmp_path / "out" / TEXT)
    corpus = prepare(str(tmp_path / "out" / TEXT), vocab_size=512)
    weights = deployed_weights(build(ARCHITECTURE, torch.Generator().manual_seed(0)))
    tokenizer = kept_tokenizer(tokenizer_folder(corpus.fingerprint), "first")
    write_pretrained(
        Pretrained(ARCHITECTURE, {n: w.clone() for n, w in weights.items()}, tokenizer), tmp_path / "model"
    )
    return settings_of(
        "smollm2-healing",
        parent="model",
        placements={"both": "3xMPMQo", "cheap": "1xMPMFo-1xooMQo-1xMPMQo"},
        searched=["both"],
        parent_lengths=[{"tokens": 256, "batch": 4}],
        lengths=[
            {"tokens": 256, "batch": 4, "factors": [1, 2, 4], "again": ["both"]},
            {"tokens": 0, "batch": 2},
            {"tokens": 128, "batch": 2, "trainable": "all"},
        ],
        micro_batch=4,
        seq_len=32,
        validation_tokens=256,
        library_tokens=256,
        device="cpu",
        output_dir="out",
    )


@pytest.fixture
def console():
    return Console(width=200, record=True)


def test_placements_are_trained_with_every_length_and_not_again(setting, console, monkeypatch):
    healing.run("small", setting, console)
    printed = console.export_text()
    results = read_results(Path("out/healing.csv"))
    both = [one for one in results if one.name == "both"]
    assert all(one.perplexity > 1 and one.english > 1 for one in results)
    (again,) = [one for one in both if one.seed == 1]
    searched = [one for one in both if one.tokens == 256 and not one.seed]
    assert len(searched) >= 3
    assert again.learning_rate == min(searched, key=lambda one: one.perplexity).learning_rate
    (last,) = [one for one in results if (one.name, one.tokens) == ("cheap", 128)]
    assert last.trainable == "all"
    assert last.learning_rate == pytest.approx(again.learning_rate / 2**0.5, rel=1e-5)  # six digits in the file
    assert "both, all trained" in printed
    monkeypatch.setattr(healing, "TrainingRun", None)  # nothing is trained again
    healing.run("small", setting, console)
    assert read_results(Path("out/healing.csv")) == results


def test_no_training_starts_after_the_time(setting, console):
    healing.run("small", replace(setting, most_s=1e9, lengths=setting.lengths[1:2]), console)
    results = read_results(Path("out/healing.csv"))
    assert {(one.name, one.tokens) for one in results} == {("parent", 256), ("both", 0), ("cheap", 0)}
    healing.run("small", replace(setting, most_s=0.0), console)
    assert read_results(Path("out/healing.csv")) == results
    assert "both, 256 tokens: not trained, since the time is too short" in console.export_text()


def test_a_missing_model_is_named(setting, console):
    with pytest.raises(UserError, match="experiment small needs none.gguf in this folder"):
        healing.run("small", replace(setting, parent="none.gguf"), console)


def test_bad_settings_are_refused(setting):
    with pytest.raises(UserError, match="`lengths` must not be empty"):
        replace(setting, lengths=())
    with pytest.raises(UserError, match="`searched` and `again` must name placements, but got other"):
        replace(setting, searched=("both", "other"))


@pytest.mark.slow
def test_the_search_takes_the_best_rate(setting, console, without_ray):
    Path("space.yaml").write_text("name: one\nbase: parent\nmembers: [3xMSMWo, 3xMPMQo, 3xMSMQo]\n")
    search = SearchSettings(
        space=str(Path("space.yaml").absolute()),
        protocol="semi2k",
        network="lan",
        budget_latency="100%",
        budget_comm="100%",
        num_trials=2,
        num_proxy_evals=0,
        finalist_seeds=0,
        tokens=512,
        batch=4,
    )
    healing.run("small", replace(setting, search=search, lengths=setting.lengths[:1]), console)
    assert "Spearman" in console.export_text()
