import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import nas
from nas import export
from nas.corpus.ngrams import NgramBaseline
from nas.export import prepare_export
from nas.report.model_card import LICENCES, Facts, model_card
from search_spaces.architecture import load_architecture
from tests.conftest import python

EARLIER = Path(__file__).parents[1] / "run" / "stored"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nas.Run, Path]:
    folder = tmp_path_factory.mktemp("card")
    run = nas.load_run(shutil.copytree(EARLIER / "published", folder / "run"))
    export.export(str(run.folder), pick="best", output_dir=str(folder / "out"))
    return run, folder / "out"


def test_a_card_has_price_perplexity_and_the_front(exported: tuple[nas.Run, Path]) -> None:
    run, folder = exported
    card = (folder / "README.md").read_text()
    best, trial = run.summary.best, run.summary.best.first
    assert card.startswith(f"# {best.notation}\n")
    assert f"These weights: {best.perplexity:.2f} (seed {trial.seed}, {trial.tokens:,} training tokens" in card
    assert "2 parties, semi-honest, dishonest majority (at most 1 corrupted)" in card
    for member in run.front:
        assert f"`{member.notation}`" in card
        assert f"{member.perplexity:.2f} (1 seed)" in card
    assert card.count("(this one)") == 1
    assert "One seed decides nothing." in card
    assert f"python -m nas.search --budget-latency {run.config.budget_latency} " in card


def test_a_placement_is_a_line_for_every_kind_of_layer_and_the_code_of_a_card_runs(exported) -> None:
    _, folder = exported
    lines = re.findall(r"^\| (\d[^|]*) \| (.+) \|$", (folder / "README.md").read_text(), flags=re.MULTILINE)
    layers = load_architecture(folder / "architecture.yaml").layers
    first = " | ".join((layers[0].norm1, layers[0].attention, layers[0].norm2, layers[0].ffn, layers[0].stabiliser))
    assert lines[0][1] == first
    assert len(lines) == len(set(layers)) == 2
    (code,) = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert "protocol published" in python("-c", code, cwd=folder)


def facts_of(run: nas.Run) -> Facts:
    return prepare_export(run, run.pick("best")).facts


def test_what_is_to_be_distrusted_is_said(exported: tuple[nas.Run, Path]) -> None:
    run, _ = exported
    facts = facts_of(run)
    ngrams = NgramBaseline(tokens=9, losses=(math.log(7.0),) * 5)  # the model is at about 300
    trust = replace(facts.estimate.trust, dealer=True)
    estimate = replace(facts.estimate, extrapolated=("num_layers 2",), trust=trust)
    facts = replace(facts, result=replace(facts.result, ngrams=ngrams), estimate=estimate)
    card = model_card(facts, "yaml", run)
    for line in (
        "It is worse than a trigram model of the same tokens.",
        "N-gram models of 9 training tokens: unigram 7, bigram 7, trigram 7, 4-gram 7, 5-gram 7.",
        "The price is extrapolated: num_layers 2.",
        "A dealer is trusted, whose work is not in the price.",
    ):
        assert f"- {line}\n" in card


def test_the_card_of_a_refused_model_says_so_first(exported: tuple[nas.Run, Path]) -> None:
    run, _ = exported
    record = replace(run.pick("best"), fold_holds=False, left_unfolded=("layers.1.attention: too far apart",))
    card = model_card(replace(facts_of(run), verified=record), "yaml", run)
    refused = "DO NOT DEPLOY IT: the search refused this model, whose folded form failed the check"
    assert f"## Limitations\n\n- {refused}; layers.1.attention: too far apart.\n" in card
    assert "was refused (Limitations)" in card
    assert "shown to fold to" not in card


@pytest.mark.parametrize(
    ("data", "told"),
    [("stdlib", LICENCES["stdlib"]), ("codeparrot:folder", LICENCES["codeparrot"]), (None, "is not known here")],
)
def test_the_licence_of_the_corpus_is_told_as_far_as_it_is_known(exported, data, told) -> None:
    run, _ = exported
    facts = facts_of(run)
    facts = replace(facts, provenance=replace(facts.provenance, data=data))
    assert told in model_card(facts, "mpc", None)


def test_a_card_without_a_run_says_how_it_was_trained(exported: tuple[nas.Run, Path]) -> None:
    run, _ = exported
    facts = facts_of(run)
    command = ("EReg(SM)", "--parent", "builtin", "--recipe.scale.batch", "2")
    facts = replace(facts, provenance=replace(facts.provenance, command=command))
    card = model_card(facts, "yaml", None)
    assert "python -m nas.train 'EReg(SM)' --parent builtin --recipe.scale.batch 2\n" in card
    assert "One seed: no spread is known." in card
    assert "## The front around it" not in card
