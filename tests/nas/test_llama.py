import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from costmodel.errors import UserError
from search_spaces.space import Withheld

pytest.importorskip("transformers")

import nas.private.__main__ as private
from nas import export, search, train
from nas.conversion.fixed_point_scale import with_stream_scale
from nas.conversion.huggingface import load_pretrained, save_model, to_transformers
from nas.conversion.parent import load_parent
from nas.conversion.verified_fold import LOG_SUMS
from nas.corpus.corpus import prepare, tokenizer_folder
from nas.corpus.tokenizer import write_tokenizer
from nas.export import prepare_export
from nas.model.decoder import Decoder, build
from nas.model.weights import deployed_weights, load_deployed
from nas.run.run import Run
from nas.study.priced_study import price_study
from search_spaces.bases import Dimensions, base_architecture
from search_spaces.graph import Choice
from search_spaces.space import load_space
from tests.conftest import python, trials_here, write_email

# what scale `smoke` makes of a Llama of 4 heads
SIZE: Any = {"layers": 3, "heads": 4, "kv_heads": 2, "d_model": 16, "d_ff": 40, "vocab": 512, "context": 32}
PRICES = ("--protocol", "semi2k", "--network", "lan", "--budget-latency", "1h")
TRAININGS = (
    "--scale smoke --seq-len 16 --train-len 32 --num-trials 1 --num-proxy-evals 0 --finalist-seeds 0 --searcher uniform"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_email(folder / "corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder / "corpus"


@pytest.fixture(scope="module")
def parent(corpus: Path) -> Path:
    """A folder of `LlamaForCausalLM`, untied, trained for a hundred steps."""
    architecture = replace(base_architecture("smollm2-135m", Dimensions(**SIZE)), tied_embeddings=False)
    made = prepare(str(corpus), vocab_size=512, seq_len=32)
    model = build(architecture, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.from_numpy(made.tokens("train")[: 100 * 8 * 32].astype("int64")).view(100, 8, 32)
    for batch in tokens:
        logits = model(batch, with_entropies=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = corpus.parent / "parent"
    save_model(architecture, deployed_weights(model), tokenizer_folder(made.fingerprint), folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    return folder


def test_a_dry_run_says_what_a_search_would(parent, capsys):
    arguments = ["--parent", str(parent), *PRICES, "--dry-run"]
    assert search.main([*arguments, "--scale", "smoke", "--seq-len", "32"]) == 0
    assert "space parent: " in capsys.readouterr().out
    assert search.main([*arguments, "--seq-len", "32", "--scale", "gpu"]) == 2
    assert "must have the `d_model` that candidates are trained with, 128, but has 16" in capsys.readouterr().err
    assert search.main([*arguments, "--seq-len", "32", "--budget-latency", "50%"]) == 0  # at its own size
    assert "within 0.387 s per token" in capsys.readouterr().out
    assert search.main(["--space", "parent", *PRICES, "--dry-run"]) == 2
    assert "--space parent is on the dimensions of a trained model; give --parent" in capsys.readouterr().err


def test_a_dry_run_reads_the_settings_of_the_parent_alone(parent, tmp_path, capsys):
    arguments = [*PRICES, "--dry-run", "--scale", "smoke", "--seq-len", "32", "--parent"]
    assert search.main([*arguments, str(parent)]) == 0
    whole = capsys.readouterr().out
    (tmp_path / "settings").mkdir()
    shutil.copy(parent / "config.json", tmp_path / "settings")
    assert search.main([*arguments, str(tmp_path / "settings")]) == 0
    assert capsys.readouterr().out == whole
    hub = tmp_path / "hub/models--acme--tiny"  # as the hub's own cache holds a model of which no weights were asked
    shutil.copytree(tmp_path / "settings", hub / "snapshots/abc")
    (hub / "refs").mkdir()
    (hub / "refs/main").write_text("abc")
    elsewhere = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    assert python("-m", "nas.search", *arguments, "acme/tiny", env=elsewhere) == whole


def test_a_space_of_ones_own_may_be_on_the_parent(parent, tmp_path, capsys):
    space_file = tmp_path / "own.yaml"
    norms = "norm1: [rmsnorm, none], norm2: [rmsnorm], stabiliser: [none]"
    choices = f"{{{norms}, attention: [softmax, none], ffn: [swiglu, quadglu, none]}}"
    space_file.write_text(f"name: own\nbase: parent\nchoices: {choices}\n")
    arguments = ["--space", str(space_file), *PRICES, "--seq-len", "32", "--dry-run"]
    assert search.main([*arguments, "--parent", str(parent)]) == 0
    assert f"space own: {2 * 9**3:,} members" in capsys.readouterr().out
    assert search.main(arguments) == 2
    assert "own.yaml is on the dimensions of a trained model; give --parent" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"got 'parent' \(`parent` is the model of a search with --parent\)"):
        load_space(str(space_file))
    space_file.write_text(space_file.read_text() + "dimensions: {layers: 2}\n")
    assert search.main([*arguments, "--parent", str(parent)]) == 2
    assert "`dimensions` of a space on `base: parent` are the parent's; leave them out" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(parent: Path, corpus: Path) -> Path:
    """A search of one candidate from it."""
    folder = corpus.parent / "run"
    given = ["--parent", str(parent), "--data", str(corpus), "--output-dir", str(folder)]
    with trials_here():
        assert search.main([*PRICES, *TRAININGS.split(), *given]) == 0
    return folder


def test_its_own_placement_trained_on_the_text_is_exported_as_a_parent(parent, corpus):
    folder, tuned = corpus.parent / "training", corpus.parent / "tuned"
    given = ["--scale", "smoke", "--seq-len", "32", "--data", str(corpus), "--output-dir", str(folder)]
    assert train.main(["SM+RMS+SwiGLU", "--parent", str(parent), *given]) == 0
    with pytest.raises(SystemExit, match="^0$"):
        export.main([str(folder), "--output-dir", str(tuned)])
    assert load_parent(str(tuned)).model.architecture == load_parent(str(parent)).model.architecture


def test_where_the_parents_scores_hold_no_bound_a_search_offers_none(parent, corpus, monkeypatch, capsys):
    monkeypatch.setattr("nas.conversion.score_bounds.LOG_SUMS", LOG_SUMS | {"bounded": (0.0, 0.0)})
    folder = corpus.parent / "exact"
    given = ["--parent", str(parent), "--data", str(corpus), "--output-dir", str(folder)]
    with trials_here():
        assert search.main([*PRICES, *TRAININGS.split(), *given]) == 0
    out = capsys.readouterr().out
    assert "no bounded softmax in layers 0, 1, 2 (from 0)" in out
    assert re.findall(r"space parent: ([\d,]+) members", out) == [f"{2 * 130**3:,}"]
    assert f"{2 * 100**3:,} members within the budget without those" in out
    run = Run.find(str(folder))
    assert run.meta.withheld == Withheld(bounded=(0, 1, 2))
    resumed = price_study(run.config, run).feasible.space
    assert all(layer.attention != "bounded" for layer in resumed.layers)


@pytest.mark.needs_engine
def test_layers_that_are_no_secret_stay_the_parents_and_are_run_so(parent, corpus, capsys):
    folder = corpus.parent / "known"
    given = ["--parent", str(parent), "--data", str(corpus), "--output-dir", str(folder)]
    given += ["--recipe.distillation.trainable=all", "--public-layers", "embed,0-1", "--client-layers", "1"]
    with trials_here():
        assert search.main([*PRICES, *TRAININGS.split(), *given]) == 0
    run, source = Run.find(str(folder)), load_pretrained(str(parent))
    trained = prepare_export(run, run.pick("best"), fold=False).weights
    same = {name for name, value in source.weights.items() if name in trained and trained[name].equal(value)}
    assert {name for name in trained if name.startswith(("embed", "layers.0.", "layers.1."))} <= same
    assert not any(name.startswith("layers.2.") for name in same if name.endswith("weight"))
    begun = price_study(run.config, run).feasible.space  # as it is resumed
    first = {vertex.layer for vertex in begun.graph if isinstance(vertex, Choice) and vertex.depth < 2}
    assert first == {source.architecture.layers[0]}
    answer = private_answer(folder, "semi2k", capsys)
    assert (answer["setting"]["public_layers"], answer["setting"]["client_layers"]) == ("embed,0-1", 1)


@pytest.fixture(scope="module")
def massive(parent: Path) -> Path:
    """The parent with a stream whose squares are beyond the ring, as those of large models are."""
    source = load_pretrained(str(parent))
    architecture, weights = with_stream_scale(source.architecture, source.weights, 2.0**13)
    write_tokenizer(parent.parent, source.tokenizer.json, source.tokenizer.end_of_text)
    save_model(architecture, weights, parent.parent, parent.parent / "massive")
    return parent.parent / "massive"


@pytest.mark.needs_engine
@pytest.mark.parametrize(
    ("model", "protocol"),
    [("run", "semi2k"), ("massive", "semi2k"), pytest.param("run", "aby3", marks=pytest.mark.slow)],
)
def test_a_llama_answers_privately(model, protocol, request, capsys):
    private_answer(request.getfixturevalue(model), protocol, capsys)


def private_answer(model: Path, protocol: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Two tokens, which must be those in the clear at the predicted cost."""
    asked = ("--prompt", "def f(", "--new-tokens", "2", "--format", "json")
    with pytest.raises(SystemExit, match="^0$"):
        private.main([str(model), *asked, "--protocol", protocol])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])  # after what a search said
    assert answer["agreement"]["top1"] == 1.0
    assert answer["total"]["measured"]["sent_bytes"] == answer["total"]["predicted"]["sent_bytes"]
    return answer


def test_its_export_is_a_model_of_transformers(run, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        export.main([str(run), "--fold", "--format", "hf", "--output-dir", str(run / "hf")])
    assert "its most likely token agrees on 100.00%" in capsys.readouterr().out
    source = load_pretrained(str(run / "hf"))
    ours = Decoder(source.architecture)
    load_deployed(ours, source.weights)
    theirs = to_transformers(source.architecture, source.weights)
    prompt = torch.randint(512, (2, 9), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits = ours(prompt).logits
        torch.testing.assert_close(theirs(prompt).logits, logits, rtol=1e-4, atol=1e-4 * logits.abs().max())
